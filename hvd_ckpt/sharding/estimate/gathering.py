"""What stage 3 holds along a trace: gradients as stage 2, and parameters gathered unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch

from hvd_ckpt.sharding.estimate.flows import Scattered
from hvd_ckpt.sharding.estimate.trace import Stretch, completions
from hvd_ckpt.sharding.formats import WireFormat
from hvd_ckpt.sharding.layout import Group, Layout

__all__ = ["Gathered"]


class Gathered(Scattered):
    """Each unit's parameters are gathered around its forward and its backward pass, the next unit's ahead of it.

    Args:
        units: the groups of each unit; those of the last one stay gathered until the backward pass is over.
        weights: format of parameters on the wire.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        format: WireFormat,
        units: Sequence[Sequence[Group]],
        weights: WireFormat,
    ) -> None:
        super().__init__(parameters, layout, format)
        self._rest = len(units) - 1
        self._whole = [sum(group.padded * group.dtype.itemsize for group in unit) for unit in units]
        self._received = [
            sum(_received(group, weights) for group in unit) if layout.ranks > 1 else 0 for unit in units
        ]
        unit_of = {group.position: number for number, unit in enumerate(units) for group in unit}
        self._unit_of = [unit_of[group.position] for group in self._groups]
        self._there: set[int] = set()
        self._coming: set[int] = set()

    def begin(self, trace: Sequence[Stretch]) -> None:
        super().begin(trace)
        self._next = {kind: _followers(trace, kind, self._rest) for kind in ("forward", "backward")}
        self._ends = Counter(stretch.event.number for stretch in trace if stretch.event.kind == "kept")
        self._left = Counter(self._unit_of[number] for number in completions(trace))
        self._trained = set(self._left)
        self._gather(self._rest)

    def unit(self, kind: str, number: int) -> None:
        if number == self._rest:
            return
        if kind == "kept":
            self._ends[number] -= 1
            if not self._ends[number]:
                self._free(number)
            return
        if number in self._there or (
            kind == "backward" and number in self._trained and not self._left[number]
        ):
            return
        if kind == "backward":  # no gradient says when those are done that are not trained
            for other in self._there - self._trained - {self._rest}:
                self._free(other)
        self._gather(number)
        following = self._next[kind].get(number)
        if following is not None and following not in self._there:
            self._launch(following)
        self.see()

    def complete(self, number: int) -> None:
        super().complete(number)
        unit = self._unit_of[number]
        self._left[unit] -= 1
        if not self._left[unit] and unit != self._rest:
            self._free(unit)

    def end(self) -> None:
        for unit in tuple(self._there):
            self._free(unit)
        super().end()

    def _gather(self, unit: int) -> None:
        self._launch(unit)
        self.see()
        self._coming.discard(unit)
        self._there.add(unit)
        self.now.received -= self._received[unit]

    def _launch(self, unit: int) -> None:
        if unit not in self._coming:
            self._coming.add(unit)
            self.now.buckets += self._whole[unit]
            self.now.received += self._received[unit]

    def _free(self, unit: int) -> None:
        if unit in self._there:
            self._there.discard(unit)
            self.now.buckets -= self._whole[unit]


def _received(group: Group, weights: WireFormat) -> int:
    return group.ranks * weights.row_bytes(group.shard_numel, group.dtype)


def _followers(trace: Sequence[Stretch], kind: str, rest: int) -> dict[int, int]:
    """For each unit the one whose pass comes next."""
    events = (stretch.event for stretch in trace)
    order = dict.fromkeys(event.number for event in events if event.kind == kind and event.number != rest)
    return dict(pairwise(order))
