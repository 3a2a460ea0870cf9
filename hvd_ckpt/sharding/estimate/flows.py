"""The memory of a sharded step at each of its moments, worked out from the trace of an unsharded one.

What a stage holds besides activations changes only where a gradient is final, or a unit of modules begins or ends. So the trace is
gone through once, and at each event the stage's *flow* does to its counts what the reducer and the store of weights do to memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hvd_ckpt.reduction.buckets import Bucket
from hvd_ckpt.reduction.buckets import lay_out as lay_out_buckets
from hvd_ckpt.sharding.estimate.trace import Stretch, completions, fires
from hvd_ckpt.sharding.flights import IN_FLIGHT, SMALL_BYTES
from hvd_ckpt.sharding.formats import WireFormat, sum_dtype
from hvd_ckpt.sharding.layout import Group, Layout

__all__ = ["Flow", "Moment", "Reduced", "Scattered", "walk"]


@dataclass
class Moment:
    """What is held at one moment of a step beyond what is there all the time, in bytes.

    Attributes:
        phase: ``forward``, ``backward``, ``step`` or ``gather``.
        activations: what forward and backward pass hold, gradients not counted.
        gradients: in buckets that are kept, in shards, or where the backward pass has put them for good.
        buckets: what communication holds.
        received: what Horovod's own threads hold for it.
        temporaries: of the optimizer's step.
    """

    phase: str = "forward"
    activations: int = 0
    gradients: int = 0
    buckets: int = 0
    received: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.buckets + self.received + self.temporaries

    def parts(self) -> dict[str, int]:
        """Under the names of an estimate's parts."""
        return {
            "gradients": self.gradients,
            "activations": self.activations,
            "buckets": self.buckets + self.received,
            "temporaries": self.temporaries,
        }


class Flow:
    """Gradients stay where the backward pass makes them: one rank, unsharded.

    Args:
        parameters: of the model, by number; only shapes and dtypes matter.

    Attributes:
        now: what is held.
        highest: the moment at which most was held.
        recorded: the most at a time without what Horovod's own threads hold.
        most_activations, most_buckets, most_temporaries: each at its own highest.
        reduced_gradients: when all are reduced.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.now = Moment()
        self.highest = Moment()
        self.recorded = 0
        self.most_activations = self.most_buckets = self.most_temporaries = self.reduced_gradients = 0

    def see(self, extra: int = 0) -> None:
        """Takes note of the moment; ``extra`` bytes of buckets are there for this instant only."""
        now = replace(self.now, buckets=self.now.buckets + extra)
        self.most_activations = max(self.most_activations, now.activations)
        self.most_buckets = max(self.most_buckets, now.buckets + now.received)
        self.most_temporaries = max(self.most_temporaries, now.temporaries)
        self.recorded = max(self.recorded, now.total - now.received)
        if now.total > self.highest.total:
            self.highest = now

    def begin(self, trace: Sequence[Stretch]) -> None:
        """Holds what is held before the forward pass."""

    def arrive(self, number: int) -> None:
        """The first gradient of a parameter is there."""
        self.now.gradients += self.parameters[number].nbytes

    def complete(self, number: int) -> None:
        """The last gradient of a parameter is there."""

    def unit(self, kind: str, number: int) -> None:
        """A unit of modules begins or ends a pass."""

    def end(self) -> None:
        """The backward pass is over and all gradients are reduced."""

    def step(self, compared: int, temporaries: int, gradient_copies: int, sent: int, received: int) -> None:
        """The optimizer steps, then weights are gathered.

        Args:
            compared: bytes that are allocated for a while before gradients are converted.
            temporaries: bytes that the step allocates for a while.
            gradient_copies: bytes of gradients converted for it.
            sent, received: bytes of encoded shards, and of what arrives.
        """
        self.reduced_gradients = self.now.gradients
        self.now = replace(self.now, phase="step", temporaries=compared)
        self.see()
        self.now = replace(self.now, temporaries=temporaries)
        self.now.gradients += gradient_copies
        self.see()
        self.now = replace(self.now, phase="gather", temporaries=0, buckets=sent, received=received)
        self.see()


class Reduced(Flow):
    """Stages 0 and 1: gradients are copied into buckets, which are kept between steps."""

    def __init__(self, parameters: Sequence[torch.Tensor], cap_bytes: float) -> None:
        super().__init__(parameters)
        self._cap_bytes = cap_bytes

    def begin(self, trace: Sequence[Stretch]) -> None:
        self._fires = Counter(fires(trace))
        self._buckets = lay_out_buckets(completions(trace), self.parameters, self._cap_bytes)
        self._of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        for bucket in self._buckets:
            bucket.waiting = len(bucket.indices)
            self.now.gradients += bucket.nbytes

    def arrive(self, number: int) -> None:
        self.now.buckets += self._waits(number)

    def complete(self, number: int) -> None:
        bucket = self._of[number]
        bucket.waiting -= 1
        if not bucket.waiting and bucket is not self._buckets[-1]:
            self._leave(bucket)

    def end(self) -> None:
        if self._buckets:
            self._leave(self._buckets[-1])
        self.now.buckets = 0

    def _leave(self, bucket: Bucket) -> None:
        self.now.buckets -= sum(map(self._waits, bucket.indices))
        if bucket.dtype is torch.bfloat16:  # which Horovod cannot add: it travels in float32
            self.now.buckets += 2 * bucket.nbytes
            self.see()

    def _waits(self, number: int) -> int:
        """Bytes outside the bucket until it is complete: none of a gradient in several parts, which meet in the bucket."""
        return self.parameters[number].nbytes if self._fires[number] == 1 else 0


class _Flight(NamedTuple):
    """Bytes of a group's buffer, of what it is encoded to, and of what arrives."""

    flat: int
    encoded: int
    received: int


class Scattered(Flow):
    """Stages 2 and 3: a group's gradients are copied into a flat buffer, which leaves as soon as all of them are there.

    Args:
        layout: of the parameters.
        format: of gradients on the wire.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], layout: Layout, format: WireFormat) -> None:
        super().__init__(parameters)
        self._layout, self._format = layout, format
        self._groups = [layout.group_of[layout.index(one) or 0] for one in parameters]
        self._flights: list[_Flight] = []

    def begin(self, trace: Sequence[Stretch]) -> None:
        self._waiting = Counter(self._groups[number].position for number in completions(trace))
        self._held: Counter[int] = Counter()  # bytes of gradients by group

    def arrive(self, number: int) -> None:
        self.now.buckets += self.parameters[number].nbytes
        self._held[self._groups[number].position] += self.parameters[number].nbytes

    def complete(self, number: int) -> None:
        group = self._groups[number]
        self._waiting[group.position] -= 1
        if self._waiting[group.position] == 0:
            self._leave(group)

    def end(self) -> None:
        while self._flights:
            self._land()

    def _leave(self, group: Group) -> None:
        flat = group.padded * group.dtype.itemsize
        while len(self._flights) >= IN_FLIGHT and self._flying + flat > SMALL_BYTES:
            self._land()
        self.see(flat)
        self.now.buckets += flat - self._held[group.position]
        self.now.gradients += group.shard_numel * sum_dtype(group.dtype).itemsize
        wire = group.ranks * self._format.row_bytes(group.shard_numel, group.dtype) if group.ranks > 1 else 0
        encoded = wire if self._format.changes(group.dtype) else 0
        self.now.buckets += encoded
        self.now.received += wire
        self._flights.append(_Flight(flat, encoded, wire))
        self.see()

    @property
    def _flying(self) -> int:
        return sum(flight.flat for flight in self._flights)

    def _land(self) -> None:
        flight = self._flights.pop(0)
        self.now.buckets -= flight.flat + flight.encoded
        self.now.received -= flight.received


def walk(trace: Sequence[Stretch], flow: Flow) -> Flow:
    """Takes a flow through the forward and the backward pass; returns it."""
    left = Counter(fires(trace))
    arrived: set[int] = set()
    in_trace = 0  # bytes of gradients, which the trace counts
    flow.begin(trace)
    for stretch in trace:
        kind, number = stretch.event
        flow.now.activations = stretch.peak - in_trace
        flow.see()
        if kind == "gradient" and number not in arrived:
            arrived.add(number)
            in_trace += flow.parameters[number].nbytes
            flow.arrive(number)
        flow.now.activations = stretch.end - in_trace
        if kind == "gradient":
            left[number] -= 1
            if not left[number]:
                flow.complete(number)
        elif kind == "loss":
            flow.now.phase = "backward"
        elif kind != "end":
            flow.unit(kind, number)
    flow.end()
    return flow
