"""Detection of ranks that run different units at stage 3 and wait for each other; the error is raised on all of them.

All ranks gather a unit together. If one rank runs an expert or a layer that another leaves out, each waits for a gather
that the other does not begin. A rank that has waited long sends the unit that it waits for to all ranks, in an allgather that is
complete once all have waited long. A wait may be over by then. But if two such rounds have the same value for every rank, then all
were waiting when the first was complete. If they waited for different units, none of them can continue.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_ckpt.collectives.asynchronous import Work, long_waits
from hvd_ckpt.collectives.exchange import Exchange

ELSEWHERE = -1


class Divergence:
    """The unit that this rank waits for, and those of the other ranks."""

    def __init__(self, exchange: Exchange, titles: Sequence[str]) -> None:
        self._exchange, self._titles = exchange, titles
        self._unit = ELSEWHERE
        self._round = 0
        self._told: Work | None = None
        self._last: list[list[int]] = []
        if exchange.ranks > 1:
            check: Any = weakref.WeakMethod(self._check)
            weakref.finalize(self, long_waits.discard, check)
            long_waits.add(check)

    @contextlib.contextmanager
    def awaiting(self, title: str) -> Iterator[None]:
        """A context in which this rank waits for a unit."""
        self._unit = self._titles.index(title)
        try:
            yield
        finally:
            self._unit = ELSEWHERE

    def _check(self, since: float) -> None:
        """A wait of this rank has lasted long.

        Raises:
            RuntimeError: the ranks wait for different units; on every rank.
        """
        if self._told is None:
            own = torch.tensor([int(since * 1e6), self._unit], dtype=torch.int64)
            self._told = self._exchange.gather_rows(own, f"divergence.{self._round}")
        elif self._told.done():
            told, self._told = self._told.wait().tolist(), None
            self._round += 1
            # The time since when each waits is part of it, so the same answer twice means the
            # same wait, not a second one for that unit.
            if told == self._last and len({unit for _, unit in told}) > 1:
                raise RuntimeError(self._said([unit for _, unit in told]))
            self._last = told

    def _said(self, units: Sequence[int]) -> str:
        waits = [
            f"rank {rank} waits "
            + (
                "in another collective"
                if unit == ELSEWHERE
                else f"for the parameters of {self._titles[unit]}"
            )
            for rank, unit in enumerate(units)
        ]
        if len(self._titles) > 1:
            remedy = (
                "run the same units in the same order on every rank, or pass shard=hc.Shard('parameters', units=[]), which gathers "
                "the whole model at once"
            )
        else:  # with units=[], say
            remedy = (
                "the model is one unit, and a module that runs outside of the model's own forward pass and without gradients "
                "(in evaluation, or in a region with use_reentrant=True) gathers it each time; recompute with "
                "use_reentrant=False, or call these modules in the forward method of the model"
            )
        return f"the ranks run different units of a model whose parameters are split over them: {', '.join(waits)}; {remedy}"
