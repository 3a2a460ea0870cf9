"""Runs: flat tensors of some parameters, moments or buffers, each averaged with one reduce-scatter and one all-gather.

A run has ``parts * peers`` rows. Where the ranks of a group have equal values, each averages the part of its place in the group
with the ranks of that place in other groups, and the group gathers the parts. The peers add up a row each. Whoever adds up a row of
weights also keeps their exact values and the outer optimizer's state, so these are split over all ranks, and the anchor is split
over a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_ckpt.local_sgd.exchange import PeerExchange, weighted_mean
from hvd_ckpt.reduction.communicator import Work
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.formats import FP32, WireFormat, sum_dtype
from hvd_ckpt.sharding.layout import ALIGNMENT
from hvd_ckpt.sharding.memory_estimate import RUN_BYTES
from hvd_ckpt.sharding.offload import Offload

AVERAGES = "the averages of all ranks (each must call optimizer.step() equally often)"

_CHUNK = 1 << 20  # elements, where a copy of all would be too much

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Segment:
    """One tensor of a run.

    Attributes:
        name: of the parameter or buffer.
        owner: the whole parameter, or the buffer.
        like: what this rank has of it (its piece, where parameters are split); ``value`` has the same shape.
        value: reads the tensor; None where this rank has none yet, which counts as zeros.
    """

    name: str
    owner: torch.Tensor
    like: torch.Tensor
    value: Callable[[], torch.Tensor | None]

    @property
    def numel(self) -> int:
        return self.like.numel() * (2 if self.like.is_complex() else 1)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of the run that this belongs to, the same on every rank."""
        dtype = self.owner.dtype
        return (dtype.to_real() if dtype.is_complex else sum_dtype(dtype)), self.owner.device

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.owner.numel() * self.owner.dtype.itemsize

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat run of this segment's elements, in its shape."""
        if self.like.is_complex():
            return torch.view_as_complex(flat.view(*self.like.shape, 2))
        return flat.view(self.like.shape)


def split_into_runs(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Segments of one kind each, of up to ``RUN_BYTES`` (one may be larger by itself); the same on every rank."""
    open_runs: dict[Any, list[Segment]] = {}
    for segment in segments:
        own = open_runs.setdefault(segment.kind, [])
        if own and sum(one.nbytes for one in own) + segment.nbytes > RUN_BYTES:
            yield open_runs.pop(segment.kind)
            open_runs[segment.kind] = [segment]
        else:
            own.append(segment)
    yield from open_runs.values()


@dataclass(frozen=True)
class Place:
    """Where this rank stands in an average.

    Attributes:
        exchange: the ranks that average the same part.
        group: gathers the parts; None where there is one.
    """

    exchange: PeerExchange
    group: Exchange | None = None

    @property
    def parts(self) -> int:
        return self.group.ranks if self.group is not None else 1

    @property
    def part(self) -> int:
        return self.group.rank if self.group is not None else 0


class ValueRun:
    """Moments or float buffers, which become the weighted mean of what they were when they left.

    Attributes:
        sent: this rank's part as it left; None where nothing is under way.
        row: this rank's row of the average, once it is known.
    """

    format = FP32

    def __init__(self, name: str, segments: Sequence[Segment], place: Place) -> None:
        self.name, self.segments, self.place = name, segments, place
        self.dtype, self.device = segments[0].kind
        rows = place.parts * place.exchange.ranks
        numel = sum(segment.numel for segment in segments)
        self.row_numel = max(-(-numel // (rows * ALIGNMENT)), 1) * ALIGNMENT  # never empty
        self.part_numel = self.row_numel * place.exchange.ranks
        self.sent: torch.Tensor | None = None
        self.row: torch.Tensor | None = None
        self._work: Work | None = None

    def begin(self) -> None:
        """Nothing to remember of the beginning of a period."""

    def squares(self) -> float:
        """The squared norm of what this rank's part brings to the divergence."""
        return 0.0

    def send(self) -> None:
        """The average leaves."""
        self.sent = self._read()
        self.resend()

    def resend(self) -> None:
        """Launches what is under way again, after a resume."""
        if self.row is not None:
            self._work = self.place.exchange.gather(self._outgoing(), self.name, self.format)
        elif self.sent is not None:
            self._work = self.place.exchange.scatter(self._message(), self.name, self.format)

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
        """Drops what is under way."""
        if self._work is not None:
            self._work.forget()
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """What is under way."""
        return {"sent": self.sent, "row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of this rank's; :meth:`resend` launches what was under way.

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
        flat = torch.zeros(self.part_numel * self.place.parts, dtype=self.dtype, device=self.device)
        for segment, view in self._views(flat):
            value = segment.value()
            if value is not None:
                view.copy_(value.detach())
        start = self.place.part * self.part_numel
        return flat if self.place.group is None else flat[start : start + self.part_numel].clone()

    def _write(self, part: torch.Tensor, add: bool) -> None:
        flat = part
        if self.place.group is not None:
            flat = part.new_empty(self.part_numel * self.place.parts)
            self.place.group.all_gather(part, flat, self.name).wait(AVERAGES)
        for segment, view in self._views(flat):
            value = segment.value()
            if value is not None:
                value.detach().copy_(value.detach() + view if add else view)

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
        start = 0
        for segment in self.segments:
            yield segment, segment.of(flat[start : start + segment.numel])
            start += segment.numel

    def _loaded(self, value: torch.Tensor | None, numel: int) -> torch.Tensor | None:
        if value is None:
            return None
        if value.numel() != numel:
            raise ValueError(
                f"the state of local SGD has {value.numel()} elements of '{self.segments[0].name}' and what follows, and this "
                f"rank has {numel}: it is of another model or number of ranks; take 'local_sgd' out of it to begin a new period"
            )
        return value.detach().to(self.device, self.dtype, copy=True)


class WeightRun(ValueRun):
    """Parameters, which become what the outer optimizer makes of their anchor and the mean change since.

    What a rank has learned since the average left is kept on top of it.

    Args:
        outer: makes the outer optimizer; None: the anchor moves by the mean change.
        wire: format in which changes travel; what it rounds away is added to the next change.
        offload: has what is kept between averages; the outer step is then on the CPU. None: beside the parameters.

    Attributes:
        anchor: this rank's part, as all ranks have it since the last average; None before the first step.

    Raises:
        OffloadError, ValueError: it cannot be offloaded.
    """

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        place: Place,
        outer: Outer | None,
        wire: WireFormat,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(name, segments, place)
        self.anchor: torch.Tensor | None = None
        self._lossy = place.exchange.ranks > 1 and wire.changes(self.dtype)
        self.format = wire if self._lossy else FP32
        self._make_outer = outer
        self._outer: torch.optim.Optimizer | None = None
        home = self.device if offload is None else torch.device("cpu")
        # this rank's row; the anchor is rounded where the wire is
        self._exact = torch.nn.Parameter(torch.empty(0, dtype=self.dtype, device=home))
        self._rest: torch.Tensor | None = None  # what the wire has rounded away so far, of this rank's part
        self._offload = offload
        self._room: dict[str, torch.Tensor] = {}
        if offload is not None:
            sizes = {"anchor": self.part_numel, "exact": self.row_numel}
            if self._lossy:
                sizes["rest"] = self.part_numel
            self._room = {what: offload.empty(numel, self.dtype) for what, numel in sizes.items()}
            self._exact.data = self._room["exact"]
            if outer is not None:
                offload.reserve(outer([self._exact]))

    def begin(self) -> None:
        if self.anchor is None:
            self._begin_at(self._read())

    def _begin_at(self, anchor: torch.Tensor) -> None:
        self.anchor = self._keep("anchor", anchor)
        self._exact.data = self._keep("exact", self._own_row(anchor).clone())
        if self._make_outer is not None:
            self._outer = self._make_outer([self._exact])
        if self._lossy:
            self._rest = self._keep("rest", torch.zeros_like(anchor))

    def send(self) -> None:
        if self._offload is not None:
            for kept in self._room.values():
                self._offload.prefetch(kept)
        super().send()

    def squares(self) -> float:
        if self.sent is None:
            return 0.0
        assert self.anchor is not None
        parts = zip(torch.split(self.anchor, _CHUNK), torch.split(self.sent, _CHUNK))
        moved = [torch.linalg.vector_norm(self._here(a) - b, dtype=torch.float64) for a, b in parts]
        return float(torch.stack(moved).square().sum())

    def apply(self, delayed: bool) -> None:
        assert self._work is not None and self.anchor is not None and self.sent is not None
        arrived = self._work.wait(AVERAGES)
        anchor = self._here(self.anchor)
        if self._lossy:
            anchor.add_(arrived)
        else:
            anchor.copy_(arrived)
        self._write(anchor - self.sent if delayed else anchor, add=delayed)
        self.anchor = self._keep("anchor", anchor)
        self._end()

    def state_dict(self) -> dict[str, Any]:
        exact = None if self.anchor is None else self._exact.detach()
        outer = None if self._outer is None else self._outer.state_dict()
        return {
            "sent": self.sent,
            "gathering": self.row is not None,
            "anchor": self.anchor,
            "exact": exact,
            "rest": self._rest,
            "outer": outer,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        anchor = self._loaded(state["anchor"], self.part_numel)
        exact = self._loaded(state["exact"], self.row_numel)
        self.anchor = None
        self.sent = self._loaded(state["sent"], self.part_numel)
        if anchor is None or exact is None:
            return
        self._begin_at(anchor)
        self._exact.data = self._keep("exact", exact)
        rest = self._loaded(state["rest"], self.part_numel) if self._lossy else None
        if rest is not None:
            self._rest = self._keep("rest", rest)
        if self._outer is not None and state["outer"] is not None:
            (made,) = self._outer.state_dict()["param_groups"]
            self._outer.load_state_dict(
                {**state["outer"], "param_groups": [made]}
            )  # lr and momentum as given now
        self.row = self._exact.detach() if state["gathering"] else None

    def _change(self) -> torch.Tensor:
        assert self.anchor is not None and self.sent is not None
        return self._here(self.anchor) - self.sent

    def _message(self) -> torch.Tensor:
        change = self._change()
        return change if self._rest is None else change.add_(self._here(self._rest))

    def _combined(self, mean: torch.Tensor) -> None:
        if self._rest is not None:
            message = self._message()
            travelled = torch.empty_like(message)
            self.format.decode(self.format.encode(message, self.place.exchange.ranks), travelled)
            self._rest = self._keep("rest", message.sub_(travelled))
        exact, mean = self._exact.data, mean.to(self._exact.device)
        if self._outer is None:
            exact.sub_(mean)
        else:
            frozen = [(start, stop, exact[start:stop] - mean[start:stop]) for start, stop in self._frozen()]
            self._exact.grad = mean
            if self._offload is None:
                self._outer.step()
            else:
                self._offload.step(self._outer, self._outer.step)
            self._exact.grad = None
            for start, stop, values in frozen:
                exact[start:stop] = values
        self.row = self._keep("exact", exact)

    def _outgoing(self) -> torch.Tensor:
        assert self.anchor is not None
        exact = self._here(self._exact.data)
        return exact - self._here(self._own_row(self.anchor)) if self._lossy else exact

    def _here(self, kept: torch.Tensor) -> torch.Tensor:
        """What is kept between averages, on the device of the parameters."""
        return kept.to(self.device)

    def _keep(self, what: str, value: torch.Tensor) -> torch.Tensor:
        """The same values where they are kept until the next average, which may leave memory there."""
        if self._offload is None:
            return value
        kept = self._room[what]
        if kept.data_ptr() != value.data_ptr():
            kept.copy_(value)
        self._offload.release(kept)
        return kept

    def _own_row(self, part: torch.Tensor) -> torch.Tensor:
        start = self.place.exchange.rank * self.row_numel
        return part[start : start + self.row_numel]

    def _frozen(self) -> Iterator[tuple[int, int]]:
        """The elements of this rank's row whose parameters are not trained now: outer momentum must not move them."""
        first = self.place.part * self.part_numel + self.place.exchange.rank * self.row_numel
        start = 0
        for segment in self.segments:
            low, high = max(start - first, 0), min(start + segment.numel - first, self.row_numel)
            if low < high and not segment.owner.requires_grad:
                yield low, high
            start += segment.numel


def root_of(process_set: Any) -> int:
    """The first rank of a process set, among all ranks."""
    return int(process_set.ranks[0]) if process_set.ranks else 0


class IntegerRun:
    """Integer and boolean buffers: they become those of the first rank, plus what this rank has counted since they left."""

    def __init__(self, name: str, segments: Sequence[Segment], place: Place) -> None:
        self.name, self.segments, self.place = name, segments, place
        self.sent: torch.Tensor | None = None
        self._work: Work | None = None

    def begin(self) -> None:
        """Nothing to remember of the beginning of a period."""

    def squares(self) -> float:
        return 0.0

    def send(self) -> None:
        self.sent = torch.cat([buffer.cpu().long().view(-1) for buffer in self._buffers()])
        self.resend()

    def resend(self) -> None:
        if self.sent is None:
            return
        members, name = self.place.exchange.process_set, f"{self.place.exchange.prefix}.{self.name}"
        handle = mpi_ops.broadcast_async(self.sent, root_of(members), name, members)
        self._work = Work([(name, handle)], lambda results: results[0])

    def combine(self, shares: Sequence[float]) -> None:
        """The message goes to all ranks by itself."""

    def apply(self, delayed: bool) -> None:
        assert self._work is not None and self.sent is not None
        firsts, start = self._work.wait(AVERAGES), 0
        for buffer in self._buffers():
            stop = start + buffer.numel()
            first, own = (one[start:stop].view(buffer.shape).to(buffer.device) for one in (firsts, self.sent))
            buffer.copy_(first if buffer.dtype is torch.bool else buffer + first - own)
            start = stop
        self.sent = self._work = None

    def _buffers(self) -> Iterator[torch.Tensor]:
        for segment in self.segments:
            value = segment.value()
            assert value is not None
            yield value.detach()

    def abandon(self) -> None:
        if self._work is not None:
            self._work.forget()
        self.sent = self._work = None

    def state_dict(self) -> dict[str, Any]:
        return {"sent": self.sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sent = None if state["sent"] is None else state["sent"].detach().clone()


Run = ValueRun | IntegerRun
