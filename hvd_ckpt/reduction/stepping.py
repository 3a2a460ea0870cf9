"""What a step depends on besides gradients and state: the options of parameter groups, and the limits of ``clip_grad_norm_``.

Ranks compare them together with their weights (:mod:`.weights`). A rank with another learning rate has other weights after the
step, but where each rank updates a shard and gives it to the others (stages 1 to 3), only the options show it.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

LIMITS = "max_norm of clip_grad_norm_()"

_MISSING, _NAN = 0x7FF8_0000_0000_0001, 0x7FF8_0000_0000_0000  # bits of numbers that no option has
# A value that is not a number, or that float64 would round, has the first bits, and the lowest bits of a hash.
_OTHER = 0x7FFC_0000_0000_0000
_HASH = (1 << 50) - 1


class SteppingOptions:
    """The options with which an optimizer steps on this rank: those that its class knows, of each group.

    Attributes:
        limits: of the calls of ``clip_grad_norm_`` since the last synchronization.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.limits: list[float] = []

    def values(self) -> list[int]:
        """Each of them as 64 bits, the same in every process: those of a number in float64, or of a hash."""
        optimizer = self._optimizer()
        assert optimizer is not None
        found = [_bits(optimizer.param_groups[group][name]) for group, name in self._places()]
        limits = None if not self.limits else self.limits[0] if len(self.limits) == 1 else tuple(self.limits)
        return [*found, _bits(limits)]

    def name(self, place: int) -> str:
        """What :meth:`values` has at a place, in words."""
        places = self._places()
        return "param_groups[{}]['{}']".format(*places[place]) if place < len(places) else LIMITS

    def _places(self) -> list[tuple[int, str]]:
        """The group and the name of each option."""
        optimizer = self._optimizer()
        assert optimizer is not None
        # PyTorch adds a default where a state is loaded, and so on some ranks alone.
        names = sorted(optimizer.defaults.keys() - {"differentiable"})
        groups = enumerate(optimizer.param_groups)
        return [(number, name) for number, group in groups for name in names if name in group]


def digest(values: Sequence[int]) -> int:
    """A number that differs if values differ, and is not 0."""
    return hash(tuple(values)) or 1


def described(value: int) -> str:
    """What these bits are of, in words."""
    if value == _MISSING or value >= _OTHER:
        return "missing" if value == _MISSING else "other values"
    number: float = struct.unpack("<d", struct.pack("<q", value))[0]
    return f"{number:g}"


def _bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        # Reading one of a GPU would wait for it.
        is_number = value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()
        value = value.item() if is_number else 0.0
    if value is None:
        return _MISSING
    if isinstance(value, str):
        return _OTHER | (zlib.crc32(value.encode()) & _HASH)
    if isinstance(value, (tuple, list)):
        return _OTHER | (hash(tuple(map(_bits, value))) & _HASH)
    if isinstance(value, int) and abs(value) >= 1 << 53:  # float64 would round it
        return _OTHER | (hash(value) & _HASH)
    number = float(value) if isinstance(value, Real) else 0.0
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found if number == number else _NAN
