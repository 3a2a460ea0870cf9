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

_MISSING, _NAN = 0x7FF8_0000_0000_0001, 0x7FF8_0000_0000_0000  # bits of numbers that no option has
LIMITS = "max_norm of clip_grad_norm_()"
_TUPLE = 0x7FFC_0000_0000_0000  # and, with the bits of a hash below, of a tuple


class SteppingOptions:
    """The options with which an optimizer steps on this rank: those that its class knows, of each group.

    Attributes:
        limits: of the calls of ``clip_grad_norm_`` since the last synchronization.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.limits: list[float] = []

    def values(self) -> list[Any]:
        """All of them as numbers, and tuples of numbers, whose hashes are the same in every process."""
        optimizer = self._optimizer()
        assert optimizer is not None
        found = [_plain(optimizer.param_groups[group][name]) for group, name in self._places()]
        limits = None if not self.limits else self.limits[0] if len(self.limits) == 1 else tuple(self.limits)
        return [*found, _plain(limits)]

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


def digest(values: Sequence[Any]) -> int:
    """A number that differs if values differ, and is not 0."""
    return hash(tuple(values)) or 1


def bits(value: Any) -> int:
    """A value of :meth:`SteppingOptions.values` as 64 bits: those of a number, or of a hash."""
    if isinstance(value, tuple):
        return _TUPLE | (hash(value) & ((1 << 50) - 1))
    if value in (_MISSING, _NAN):
        return int(value)
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def described(value: int) -> str:
    """What these bits are of, in words."""
    if value == _MISSING or value >= _TUPLE:
        return "missing" if value == _MISSING else "other values"
    number: float = struct.unpack("<d", struct.pack("<q", value))[0]
    return f"{number:g}"


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return value if value == value else _NAN
    if kind is int or kind is bool:
        return value if abs(value) < 1 << 62 else (value,)
    if value is None:
        return _MISSING
    if isinstance(value, torch.Tensor):
        # Reading one of a GPU would wait for it.
        is_number = value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()
        return _plain(value.item()) if is_number else 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, str):
        return (zlib.crc32(value.encode()),)
    return _plain(float(value)) if isinstance(value, Real) else 0
