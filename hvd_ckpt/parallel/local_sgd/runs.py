"""Runs: flat tensors of some parameters, moments or buffers, each averaged with one reduce-scatter and one all-gather.

A run has ``parts * peers`` rows. If the ranks of a group have equal values, each rank averages one part, which its place in the
group determines. It does so with the ranks of the same place in other groups. The group then gathers the parts. Each peer adds up
one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.formats import FP32, sum_dtype
from hvd_ckpt.parallel.local_sgd.exchange import PeerExchange, weighted_mean
from hvd_ckpt.reduction.assignment import pack
from hvd_ckpt.sharding.layout import ALIGNMENT, RUN_BYTES
from hvd_ckpt.utils.states import Count, OptimizerState, State, Weight

AVERAGES = "the averages of all ranks (each must call optimizer.step() equally often)"


@dataclass(frozen=True)
class Segment:
    """One tensor of a run.

    Attributes:
        name: name of the parameter or buffer.
        owner: the whole parameter, or the buffer.
        like: what this rank has of it (its piece, where parameters are split); ``value`` has the same shape.
        value: reads the tensor where it is not ``like``; None where this rank has none yet, which counts as zeros.
    """

    name: str
    owner: torch.Tensor
    like: torch.Tensor
    value: Callable[[], torch.Tensor | None] | None = None

    def read(self) -> torch.Tensor | None:
        """What the rank has now; complex numbers as pairs of real ones."""
        value = self.like if self.value is None else self.value()
        if value is None:
            return None
        return torch.view_as_real(value.detach()) if value.is_complex() else value.detach()

    @property
    def numel(self) -> int:
        return self.like.numel() * (2 if self.like.is_complex() else 1)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of the run that this belongs to, the same on every rank."""
        dtype = self.owner.dtype
        return (dtype.to_real() if dtype.is_complex else sum_dtype(dtype)), self.owner.device


def split_into_runs(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Segments of one kind each, of up to ``RUN_BYTES`` (one may be larger by itself); the same on every rank."""
    return pack(((segment, segment.kind, segment.owner.nbytes) for segment in segments), RUN_BYTES)


class Run:
    """Moments or float buffers, which become the weighted mean of what they were when they left; one message each way.

    Attributes:
        sent: what left; None where nothing is under way.
        row: this rank's row of the average, once it is known.
    """

    format = FP32

    def __init__(self, name: str, segments: Sequence[Segment], peers: PeerExchange) -> None:
        self.name, self.segments, self.peers = name, segments, peers
        self.dtype, self.device = segments[0].kind
        # 1000 elements between two groups of two ranks with equal values: 2 parts of 2 rows. A row has 4 * 64 = 256 elements,
        # since a quarter of 1000 is rounded up to the alignment; a part has 512.
        rows = peers.parts * peers.ranks
        numel = sum(segment.numel for segment in segments)
        self.row_numel = max(-(-numel // (rows * ALIGNMENT)), 1) * ALIGNMENT  # never empty
        self.part_numel = self.row_numel * peers.ranks
        self._padding = self.part_numel * peers.parts - numel
        self.sent: torch.Tensor | None = None
        self.row: torch.Tensor | None = None
        self._work: Work | None = None

    def send(self) -> float:
        """The average leaves; returns the squared norm of what this rank's part brings to the divergence."""
        self.sent = self._read()
        self.resend()
        return 0.0

    def resend(self) -> None:
        """Launches what is under way, also again after a resume."""
        if self.row is not None:
            self._work = self.peers.gather(self._outgoing(), self.name, self.format)
        elif self.sent is not None:
            self._work = self.peers.scatter(self._message(), self.name, self.format)

    def combine(self, shares: Sequence[float]) -> None:
        """Adds up this rank's row, each peer's by its share, and sends it."""
        assert self._work is not None
        rows = self._work.wait(AVERAGES)
        self._combined(weighted_mean(rows, shares, self.format, self.dtype, self.row_numel))
        self.resend()

    def apply(self, delayed: bool) -> None:
        """Writes the average where its values came from."""
        assert self._work is not None
        self._write(self._work.wait(AVERAGES), add=False)
        self._end()

    def abandon(self) -> None:
        if self._work is not None:
            self._work.forget()
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return {"sent": self.sent, "row": self.row}

    def load_state_dict(self, state: dict[str, Any], combined: bool) -> None:
        """Loads a state of this rank's; :meth:`resend` launches what was under way, which may have been added up already.

        Raises:
            ValueError: it is of another size.
        """
        self.sent = self._loaded(state["sent"], self.part_numel)
        self.row = self._loaded(state["row"], self.row_numel)

    def _message(self) -> torch.Tensor:
        assert self.sent is not None
        return self.sent

    def _outgoing(self) -> torch.Tensor:
        assert self.row is not None
        return self.row

    def _combined(self, mean: torch.Tensor) -> None:
        self.row = mean

    def _end(self) -> None:
        self.sent = self.row = self._work = None

    def _read(self) -> torch.Tensor:
        flat = torch.zeros(self.part_numel * self.peers.parts, dtype=self.dtype, device=self.device)
        for value, view in self._values(flat):
            view.copy_(value)
        # The part is copied, so that the whole run is freed before anything is sent.
        start = self.peers.part * self.part_numel
        return flat if self.peers.group is None else flat[start : start + self.part_numel].clone()

    def _write(self, part: torch.Tensor, add: bool) -> None:
        flat = part
        if self.peers.group is not None:
            flat = part.new_empty(self.part_numel * self.peers.parts)
            self.peers.group.all_gather(part, flat, self.name).wait(AVERAGES)
        for value, view in self._values(flat):
            value.copy_(value + view if add else view)

    def _values(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank has of each segment, and its place in a flat run."""
        pieces = torch.split(flat, [segment.numel for segment in self.segments] + [self._padding])
        for segment, piece in zip(self.segments, pieces):
            if (value := segment.read()) is not None:
                yield value, piece.view(value.shape)

    def _loaded(self, value: torch.Tensor | None, numel: int) -> torch.Tensor | None:
        if value is None:
            return None
        if value.numel() != numel:
            raise ValueError(
                f"the state of local SGD has {value.numel()} elements of '{self.segments[0].name}' and what follows, and this "
                f"rank has {numel}: it is of another model or number of ranks; take 'local_sgd' out of it to begin a new period"
            )
        return value.detach().to(self.device, self.dtype, copy=True)


class RunState(State):
    """State of one average of local SGD: what is under way, and of parameters the anchor and the outer optimizer."""

    sent: torch.Tensor | None = None
    row: torch.Tensor | None = None
    anchor: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    outer: OptimizerState | None = None


NOTHING: dict[str, Any] = dict(RunState())


class FragmentState(State):
    sent_at: Count | None
    weight: Weight
    marks: tuple[Count, Weight]
    moved: Weight
    squares: Weight
    runs: dict[str, RunState]


@dataclass
class Fragment:
    """A part of the model that is averaged at one time.

    Attributes:
        number: among the fragments.
        runs: what is averaged.
        sent_at: the step after which the average under way has left; None if nothing is under way.
        weight: weight of this rank in the average.
        moved: what this rank had moved from the anchor, squared.
        marks: this rank's steps and tokens until then.
        squares: the sum of what all ranks had moved in the last average.
        weights, distances: weights and distances of all ranks, in flight.
    """

    number: int
    runs: list[Run] = field(default_factory=list)
    sent_at: int | None = None
    weight: float = 0.0
    moved: float = 0.0
    marks: tuple[int, float] = (0, 0.0)
    squares: float = 0.0
    weights: Work | None = None
    distances: Work | None = None

    def under_way(self) -> list[Run]:
        return [run for run in self.runs if run.sent is not None]

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in FragmentState.model_fields}
        return {**state, "runs": {run.name: run.state_dict() for run in self.runs}}

    def load_state_dict(self, state: Mapping[str, Any], combined: bool) -> None:
        """Loads a state, and sends the runs that were under way, whose rows may have been added up already."""
        for name in FragmentState.model_fields.keys() - {"runs"}:
            setattr(self, name, state[name])
        for run in self.runs:
            # A run of moments that were unknown when the state was saved has nothing under way.
            run.load_state_dict({**NOTHING, **state["runs"].get(run.name, {})}, combined)
            run.resend()

    def abandon(self) -> None:
        for run in self.runs:
            run.abandon()
        for work in (self.weights, self.distances):
            if work is not None:
                work.forget()
        self.weights = self.distances = None
