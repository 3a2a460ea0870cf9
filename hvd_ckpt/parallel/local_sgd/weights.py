"""Runs of parameters: their anchor, the outer optimizer that updates it, and the rounding errors of a lossy wire.

The rank that adds up a row of weights also keeps their exact values and the outer optimizer's state. So these are split over all
ranks, and the anchor is split over a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvd_ckpt.collectives.formats import FP32, WireFormat
from hvd_ckpt.parallel.local_sgd.exchange import PeerExchange
from hvd_ckpt.parallel.local_sgd.runs import AVERAGES, Run, Segment

_CHUNK = 1 << 20  # elements, where a copy of all would be too much

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class WeightRun(Run):
    """Parameters, which become what the outer optimizer makes of their anchor and the mean change since.

    What a rank has learned since the average left is kept on top of it.

    Args:
        outer: makes the outer optimizer; None: the anchor moves by the mean change.
        wire: communication format of changes; rounding errors are added to the next change.

    Attributes:
        anchor: this rank's part, as all ranks have it since the last average; None before the first step.
    """

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        peers: PeerExchange,
        outer: Outer | None,
        wire: WireFormat,
    ) -> None:
        super().__init__(name, segments, peers)
        self.anchor: torch.Tensor | None = None
        self._lossy = peers.ranks > 1 and wire.changes(self.dtype)
        self.format = wire if self._lossy else FP32
        self._make_outer = outer
        self._outer: torch.optim.Optimizer | None = None
        # this rank's row; the anchor is rounded where the wire is
        self._exact = torch.nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device))
        self._rest: torch.Tensor | None = None  # what the wire has rounded away so far, of this rank's part

    def begin(self) -> None:
        """Remembers the anchor of the first period."""
        if self.anchor is None:
            self._begin_at(self._read())

    def _begin_at(self, anchor: torch.Tensor) -> None:
        self.anchor = anchor
        self._exact.data = self._own_row(anchor).clone()
        if self._make_outer is not None:
            self._outer = self._make_outer([self._exact])
        if self._lossy:
            self._rest = torch.zeros_like(anchor)

    def send(self) -> float:
        super().send()
        assert self.anchor is not None and self.sent is not None
        parts = zip(torch.split(self.anchor, _CHUNK), torch.split(self.sent, _CHUNK))
        moved = [torch.linalg.vector_norm(a - b, dtype=torch.float64) for a, b in parts]
        return float(torch.stack(moved).square().sum())

    def apply(self, delayed: bool) -> None:
        assert self._work is not None and self.anchor is not None and self.sent is not None
        arrived = self._work.wait(AVERAGES)
        # What has arrived is the change of the rows if the wire rounds, else the rows themselves: see _outgoing().
        if self._lossy:
            self.anchor.add_(arrived)
        else:
            self.anchor.copy_(arrived)
        # With a delay, parameters p have moved from what was sent, s, by what they have learned since. So
        # they become p + (anchor - s), which is the anchor with p - s on top.
        self._write(self.anchor - self.sent if delayed else self.anchor, add=delayed)
        self._end()

    def state_dict(self) -> dict[str, Any]:
        exact = None if self.anchor is None else self._exact.detach()
        outer = None if self._outer is None else self._outer.state_dict()
        return {
            "sent": self.sent,
            "anchor": self.anchor,
            "exact": exact,
            "rest": self._rest,
            "outer": outer,
        }

    def load_state_dict(self, state: dict[str, Any], combined: bool) -> None:
        anchor = self._loaded(state["anchor"], self.part_numel)
        exact = self._loaded(state["exact"], self.row_numel)
        self.anchor = None
        if anchor is None or exact is None:
            return
        self.sent = self._loaded(state["sent"], self.part_numel)
        self._begin_at(anchor)
        self._exact.data = exact
        rest = self._loaded(state["rest"], self.part_numel) if self._lossy else None
        if rest is not None:
            self._rest = rest
        if self._outer is not None and state["outer"] is not None:
            (made,) = self._outer.state_dict()["param_groups"]
            # With learning rate and momentum as they are given now.
            self._outer.load_state_dict({**state["outer"], "param_groups": [made]})
        # What is being gathered are the exact values of this row, which are kept anyway: see _combined().
        self.row = self._exact.detach() if combined and self.sent is not None else None

    def _message(self) -> torch.Tensor:
        assert self.anchor is not None and self.sent is not None
        change = self.anchor - self.sent
        return change if self._rest is None else change.add_(self._rest)

    def _combined(self, mean: torch.Tensor) -> None:
        if self._rest is not None:
            message = self._message()
            # Encoded once more, to see what the wire has made of it, instead of keeping that since it left.
            travelled = torch.empty_like(message)
            self.format.decode(self.format.encode(message, self.peers.ranks), travelled)
            self._rest = message.sub_(travelled)
        # The mean is of anchor minus parameters, like a gradient: going against it leads from the anchor to the ranks' mean.
        exact = self._exact.data
        if self._outer is None:
            exact.sub_(mean)
        else:
            frozen = [(start, stop, exact[start:stop] - mean[start:stop]) for start, stop in self._frozen()]
            self._exact.grad = mean
            self._outer.step()
            self._exact.grad = None
            for start, stop, values in frozen:
                exact[start:stop] = values
        self.row = exact

    def _outgoing(self) -> torch.Tensor:
        assert self.anchor is not None
        exact = self._exact.data
        return exact - self._own_row(self.anchor) if self._lossy else exact

    def _own_row(self, part: torch.Tensor) -> torch.Tensor:
        start = self.peers.rank * self.row_numel
        return part[start : start + self.row_numel]

    def _frozen(self) -> Iterator[tuple[int, int]]:
        """The elements of this rank's row whose parameters are not trained now: outer momentum must not move them."""
        first = self.peers.part * self.part_numel + self.peers.rank * self.row_numel
        start = 0
        for segment in self.segments:
            low, high = max(start - first, 0), min(start + segment.numel - first, self.row_numel)
            if low < high and not segment.owner.requires_grad:
                yield low, high
            start += segment.numel
