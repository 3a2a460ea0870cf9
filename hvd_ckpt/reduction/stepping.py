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
        names = sorted(optimizer.defaults)
        found = [_plain(group.get(name)) for group in optimizer.param_groups for name in names]
        limits = None if not self.limits else self.limits[0] if len(self.limits) == 1 else tuple(self.limits)
        return [*found, _plain(limits)]

    def name(self, place: int) -> str:
        """What :meth:`values` has at a place, in words."""
        optimizer = self._optimizer()
        assert optimizer is not None
        names = sorted(optimizer.defaults)
        group, number = divmod(place, max(len(names), 1))
        if group == len(optimizer.param_groups):
            return "max_norm of clip_grad_norm_()"
        return f"param_groups[{group}]['{names[number]}']"


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
