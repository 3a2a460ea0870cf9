"""Weights of stage 3 that are written while they are whole: by a forward pass, or inside ``gathered_parameters()``.

In-place writes change a parameter's version counter, and replaced data changes its address. Writes through ``parameter.data``
change neither. So while a unit is gathered for a pass, its parameters have a class that records when their ``data`` is read, and
bits are compared then. A rank keeps its shard of the written values. The next synchronization compares whether all ranks wrote the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from hvd_ckpt.reduction.agreement import flag_of
from hvd_ckpt.utils.fingerprint import fingerprint

_BEFORE = "_before_hvd_ckpt"  # of a parameter whose data was taken: its fingerprint then
_DATA: Any = torch.Tensor.data


class _Watched:
    """Mixin of a parameter's class while it is whole for a pass."""

    @property
    def data(self) -> Any:
        # The first time since the unit is whole: later ones must not hide what was written in between.
        if _BEFORE not in vars(self):
            setattr(self, _BEFORE, int(fingerprint(self)))  # type: ignore[arg-type]
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)


@functools.cache
def watched_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class that a parameter of class ``kind`` has while it is whole for a pass."""
    made: Any = type(kind)
    watched: type[torch.Tensor] = made(kind.__name__, (_Watched, kind), {})
    return watched


def forget_data(parameter: torch.Tensor) -> None:
    """Forgets that the parameter's data was read."""
    vars(parameter).pop(_BEFORE, None)


def data_was_written(parameter: torch.Tensor) -> bool:
    """Whether the parameter's data was taken and has other bits by now."""
    before = vars(parameter).pop(_BEFORE, None)
    return before is not None and before != int(fingerprint(parameter))


class WrittenWeights:
    """Writes of this rank since the last synchronization: fingerprints of whole parameters, by index."""

    def __init__(self) -> None:
        self._fingerprints: dict[int, int] = {}

    def note(self, index: int, written: torch.Tensor) -> None:
        """A parameter has these values now."""
        self._fingerprints[index] = int(fingerprint(written))

    def forget(self, indices: Iterable[int] | None = None) -> None:
        """These parameters, or all, were given other values since, or have been compared."""
        for index in list(self._fingerprints) if indices is None else indices:
            self._fingerprints.pop(index, None)

    @property
    def digest(self) -> float:
        """One number for all writes."""
        return flag_of(self._fingerprints)

    def __contains__(self, index: int) -> bool:
        return index in self._fingerprints

    def differs(self, index: int, kept: torch.Tensor) -> bool:
        """Whether this rank has written other values than those that were kept."""
        return index in self._fingerprints and self._fingerprints[index] != int(fingerprint(kept))
