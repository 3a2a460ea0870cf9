"""The time of a training step on a stated network, from what a rank sends in it: formulas of sizes, for each layout.

Buckets, groups and units are those that the library lays out for the model, so the kinds and bytes of all collectives are
exact. All ranks do the same at the same time. Collectives run one after the other, beside computation:

    computation   forward ----- backward of block 3, 2, 1, 0 ----- wait ------ step
    collectives                          [bucket 0]  [bucket 1][bucket 2]

Each collective takes a latency and its bytes over a bandwidth, as in Hockney, "The communication challenge for MPP" (1994), by
:class:`hvd_ckpt.prediction.network.Network`. Contention beyond the hosts' links, stragglers and the memory traffic of sums are left
out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeVar

from torch import nn

from hvd_ckpt.collectives.formats import FP32, wire_formats
from hvd_ckpt.parallel.pipeline.schedule import Schedule, make_schedule, timeline
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.training_layout import TrainingLayout
from hvd_ckpt.reduction.assignment import lay_out
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.reduction.flags import ControlFlags
from hvd_ckpt.reduction.weights import Sums
from hvd_ckpt.sharding.in_flight import IN_FLIGHT, SMALL_BYTES
from hvd_ckpt.sharding.layout import RUN_BYTES, Layout
from hvd_ckpt.sharding.units import find_units

Kind = Literal["allreduce", "scatter", "alltoall", "all_gather", "message", "exchange"]
"""``scatter`` is this library's reduce-scatter; a ``message`` goes to another stage, an ``exchange`` to each other part of a
layer."""

NUMBER = 8  # bytes of a number of each rank

Step = TypeVar("Step", bound="StepTime")


class StepTime:
    """A step of one rank: computation, collectives that run beside it, and waits for these.

    Attributes:
        flags: whether ranks tell each other in a step what they need to know.
        in_flight: reduce-scatters and gathers of shards that are under way at a time, where they are large.
        now: seconds until here.
        computing, communicating: seconds of computation, and in which collectives or messages run, hidden or not.
        bubble: seconds in which the first stage waits, by its schedule.
        agreement: seconds in which all ranks agree on what is ready, in each cycle.
        operations: kind and bytes of each collective or message, in the order of launches.
    """

    flags, in_flight = True, IN_FLIGHT

    def __init__(self, network: Network, layout: TrainingLayout) -> None:
        # A host has no more ranks than there are.
        network = dataclasses.replace(network, local=min(network.local, layout.ranks))
        self.ranks, self.layout = layout.replicas, layout
        self.network, self._links = network.every(layout.tensor), network
        self.now = self.computing = self.communicating = self.bubble = 0.0
        self.operations: list[tuple[Kind, int]] = []
        self._under_way: list[tuple[float, int]] = []  # ends and bytes
        self.agreement = self.network.agreement(self.ranks)
        self._period = max(network.cycle, self.agreement) if network.controller == "mpi" else 0.0
        self._cycle, self._free, self._link = -math.inf, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Of the step, with all that was launched."""
        return max(self.now, self._free, self._link)

    def compute(self, seconds: float) -> None:
        """Adds computation."""
        self.now += seconds
        self.computing += seconds

    def launch(self, kind: Kind, nbytes: int) -> float:
        """Launches a collective or message; returns when it ends."""
        seconds = self.seconds_of(kind, nbytes)
        if kind in ("message", "exchange"):  # travel beside the collectives
            end = self._link = max(self.now, self._link) + seconds
        else:
            end = self._free = self.begin(self.now) + seconds
        self.operations.append((kind, nbytes))
        self.communicating += seconds
        return end

    def wait(self, *ends: float) -> None:
        """Waits for what has these ends."""
        self.now = max(self.now, *ends, 0.0)

    def launch_shard(self, kind: Kind, nbytes: int) -> None:
        """Launches a reduce-scatter or a gather of shards, of which few are under way at a time."""
        while len(self._under_way) >= self.in_flight:
            if nbytes + sum(size for _, size in self._under_way) <= SMALL_BYTES:
                break
            self.wait(self._under_way.pop(0)[0])
        self._under_way.append((self.launch(kind, nbytes), nbytes))

    def wait_for_shards(self) -> None:
        """Waits for all of them."""
        self.wait(*(end for end, _ in self._under_way))
        self._under_way.clear()

    def begin(self, ready: float) -> float:
        """When a collective that is ready begins."""
        # What was ready when the present cycle began runs in it, after what is before it. The rest waits for the first
        # cycle that begins after it is ready: over MPI at fixed intervals, over Gloo when something is ready. A cycle in
        # which nothing is ready has an agreement, too:
        #     ready    A B              C
        #     thread   [agree] A B [agree] -- [agree] C
        if ready > self._cycle:
            begin = max(self._cycle + self._period, self._free)
            if ready > begin:
                cycles = math.ceil((ready - begin) / self._period) if self._period else 0
                begin = begin + cycles * self._period if cycles else ready
            self._cycle, self._free = begin, begin + self.agreement
        return self._free

    def seconds_of(self, kind: Kind, nbytes: int) -> float:
        """Seconds of a collective or message."""
        network, ranks = self.network, self.ranks
        if kind == "message":
            return self._links.stage_message(nbytes, self.layout.ranks, self.layout.stages)
        if kind == "exchange":
            return self._links.exchange(nbytes, self.layout.tensor)
        if kind == "allreduce":
            return network.allreduce(nbytes, ranks)
        if kind == "all_gather":
            return network.ring(nbytes, ranks)
        return network.scatter(nbytes, ranks) if kind == "scatter" else network.alltoall(nbytes, ranks)


@dataclass
class ModelSizes:
    """A model whose parts, its blocks, run one after the other, and the seconds that they take.

    Attributes:
        model: may be on the meta device.
        forward, backward: seconds of each block in a step of the whole model; the latter with its recomputation. Micro-batches,
            stages and parts divide them.
        activation: bytes of what a block hands to the next one, in a step.
        blocks: by default the children of the model. Parameters in none of them count as the last block's.
        cuts: seconds of each stage's forward and backward pass of one micro-batch; by default those of equal stages.
        cap: bytes of a bucket.
    """

    model: nn.Module
    forward: Sequence[float]
    backward: Sequence[float]
    activation: int = 0
    blocks: Sequence[nn.Module] | None = None
    cuts: tuple[Sequence[float], Sequence[float]] | None = None
    cap: float = 25 * MEBIBYTE
    _named: list[tuple[str, Any]] = field(init=False)
    _block_of: dict[int, int] = field(init=False)
    _users: Counter[int] = field(init=False)
    _blocks: int = field(init=False)  # their number

    def __post_init__(self) -> None:
        blocks = list(self.model.children()) if self.blocks is None else self.blocks
        self._blocks = len(blocks)
        self._named = list(self.model.named_parameters())
        # A parameter of two blocks has its gradient when the backward pass is through the first one.
        self._block_of = {id(parameter): len(blocks) - 1 for _, parameter in self._named} | {
            id(parameter): number
            for number, block in reversed(list(enumerate(blocks)))
            for parameter in block.parameters()
        }
        self._users = Counter(id(parameter) for block in blocks for parameter in block.parameters())

    def step(self, step: Step) -> Step:
        """Fills a step; of local SGD, all steps from one average to the next."""
        layout = step.layout
        if layout.every:
            self._averages(step, layout)
        elif layout.stages > 1:
            self._stages(step, layout)
        else:
            for number in range(layout.micro_batches):
                self._micro_batch(step, layout, last=number == layout.micro_batches - 1)
        if layout.shard in ("optimizer", "gradients"):
            self._gather_weights(step, layout)
        return step

    def _micro_batch(self, step: StepTime, layout: TrainingLayout, last: bool) -> None:
        forward, backward = (
            [each / layout.tensor / layout.micro_batches for each in seconds]
            for seconds in (self.forward, self.backward)
        )
        if layout.tensor > 1:
            self._exchanges(step, layout)
        if layout.shard == "parameters":
            self._sharded_parameters(step, layout, forward, backward)
            return
        for seconds in forward:
            step.compute(seconds)
        if layout.shard == "gradients":
            self._scattered(step, layout, backward)
        elif last:
            self._reduced(step, layout, backward)
        else:
            step.compute(sum(backward))

    def _buckets(self, layout: TrainingLayout) -> list[tuple[int, int]]:
        """Bytes of each bucket of a process, and the block whose backward pass completes it."""
        divisor = layout.tensor * layout.stages
        parameters = [parameter for _, parameter in self._named]
        block_of = {index: self._block_of[id(parameter)] for index, parameter in enumerate(parameters)}
        # Within a block a parameter that another one shares is the last to be final.
        order = sorted(
            block_of, key=lambda index: (-block_of[index], self._users[id(parameters[index])], -index)
        )
        return [
            (bucket.nbytes // divisor, min(self._block_of[id(entry.parameter)] for entry in bucket.entries))
            for bucket in lay_out(order, parameters, self.cap * divisor)
        ]

    def _reduced(self, step: StepTime, layout: TrainingLayout, backward: Sequence[float]) -> None:
        """A backward pass from which whole gradients are reduced; the last bucket leaves at its end, with the flags."""
        *buckets, last = self._buckets(layout)
        ends: list[float] = []
        for block in reversed(range(len(backward))):
            step.compute(backward[block])
            while len(ends) < len(buckets) and buckets[len(ends)][1] >= block:
                ends.append(step.launch("allreduce", buckets[len(ends)][0]))
        ends += [step.launch("allreduce", nbytes) for nbytes, _ in buckets[len(ends) :]]
        flags = self._flag_bytes if step.flags else 0
        step.wait(*ends, step.launch("allreduce", last[0] + flags))

    def _gather_weights(self, step: StepTime, layout: TrainingLayout) -> None:
        for nbytes, _ in self._groups(layout):
            step.launch_shard("all_gather", _sent(layout, nbytes))
        step.wait_for_shards()

    def _groups(self, layout: TrainingLayout) -> list[tuple[int, int]]:
        """Bytes of each group of shards of a process, and the block whose backward pass completes it."""
        shards, divisor = Layout(layout.replicas), layout.tensor * layout.stages
        groups = shards.add(list(reversed(self._named)), self.cap * divisor)
        return [
            (
                group.padded_bytes // divisor,
                min(self._block_of[id(parameter)] for parameter in shards.parameters_of([group])),
            )
            for group in groups
        ]

    def _scattered(self, step: StepTime, layout: TrainingLayout, backward: Sequence[float]) -> None:
        """A backward pass of which each rank keeps its shard of the gradients."""
        groups = self._groups(layout)
        for block in reversed(range(len(backward))):
            step.compute(backward[block])
            while groups and groups[0][1] >= block:
                step.launch_shard("scatter", _sent(layout, groups.pop(0)[0], gradients=True))
        self._shard_flags(step)
        step.wait_for_shards()

    @property
    def _flag_bytes(self) -> int:
        return 4 * (ControlFlags.size(len(self._named)) + Sums.SIZE)

    def _shard_flags(self, step: StepTime) -> None:
        if step.flags:
            step.wait(step.launch("allreduce", self._flag_bytes))

    def _sharded_parameters(
        self, step: StepTime, layout: TrainingLayout, forward: Sequence[float], backward: Sequence[float]
    ) -> None:
        """Units are gathered before they run, each while the one before runs, and gradients scattered after they have run."""
        shards = Layout(layout.replicas)
        found = find_units(self.model)
        *units, root = [
            sum(
                group.padded_bytes
                for group in shards.add([(str(id(parameter)), parameter) for parameter in unit.parameters])
            )
            // layout.tensor
            for unit in found
        ]
        unit_of = {self._block_of[id(unit.parameters[0])]: number for number, unit in enumerate(found[:-1])}

        def seconds_of(blocks: Sequence[float]) -> list[float]:
            """Seconds of each unit; a block without a unit of its own counts with the one before it."""
            seconds, unit = [0.0] * max(len(units), 1), 0
            for block, each in enumerate(blocks):
                unit = unit_of.get(block, unit)
                seconds[unit] += each
            return seconds

        def through(order: Sequence[int], seconds: Sequence[float], scattered: bool) -> None:
            gathered = step.launch("all_gather", _sent(layout, units[order[0]]))
            for unit, following in zip_longest(order, order[1:]):
                step.wait(gathered)
                if following is not None:
                    gathered = step.launch("all_gather", _sent(layout, units[following]))
                step.compute(seconds[unit])
                if scattered:
                    step.launch_shard("scatter", _sent(layout, units[unit], gradients=True))

        step.wait(step.launch("all_gather", _sent(layout, root)))
        if units:
            numbers = range(len(units))
            through(numbers, seconds_of(forward), scattered=False)
            through(numbers[::-1], seconds_of(backward), scattered=True)
        else:
            step.compute(sum(forward) + sum(backward))
        step.launch_shard("scatter", _sent(layout, root, gradients=True))
        self._shard_flags(step)
        step.wait_for_shards()

    def _averages(self, step: StepTime, layout: TrainingLayout) -> None:
        for seconds in (*self.forward, *self.backward) * layout.every:
            step.compute(seconds)
        numbers, gathers = NUMBER * layout.ranks, list[float]()
        step.wait(step.launch("all_gather", numbers))  # of samples, the weights of the mean
        # Rows to all, and the means of rows to all.
        for group in Layout(layout.ranks).add(list(reversed(self._named)), RUN_BYTES):
            scattered = step.launch("alltoall", group.padded_bytes)
            # Two runs are under way at a time: one is added up while the one before is gathered.
            step.wait(*gathers[-2:-1], scattered)
            gathers.append(step.launch("all_gather", group.padded_bytes))
        # Last the distances of the ranks from the mean.
        step.wait(*gathers[-2:], step.launch("all_gather", numbers))

    def _stages(self, step: StepTime, layout: TrainingLayout) -> None:
        """The stage that ends last, the first: what it computes and waits for, then a message for each other stage, twice."""
        count = layout.micro_batches
        forward, backward = self.cuts or (
            [sum(seconds) / layout.stages / layout.tensor / count] * layout.stages
            for seconds in (self.forward, self.backward)
        )
        spans = timeline(_schedule(layout.stages, count), forward, backward)[0]
        *others, last = spans
        busy = sum(span.end - span.start for span in others)
        step.compute(busy)
        step.bubble = last.start - busy
        step.wait(last.start)
        for _ in range(2 * (layout.stages - 1)):
            step.wait(step.launch("message", self.activation // count))
        if layout.tensor > 1:
            for _ in range(count):
                self._exchanges(step, layout)
        blocks = [(last.end - last.start) / self._blocks] * self._blocks
        if layout.shard in ("gradients", "parameters"):
            self._scattered(step, layout, blocks)
        else:
            self._reduced(step, layout, blocks)
        if layout.shard == "parameters":  # gathered for both passes of each micro-batch
            for _ in range(2 * count):
                self._gather_weights(step, layout)

    def _exchanges(self, step: StepTime, layout: TrainingLayout) -> None:
        """Two sums among the parts of each layer in its forward pass, in its recomputation and in its backward pass."""
        # Two parts exchange all; more scatter and gather.
        nbytes = self.activation // layout.micro_batches
        each, sums = (nbytes, 1) if layout.tensor == 2 else (nbytes // layout.tensor, 2)
        for _ in range(6 * sums * self._blocks // layout.stages):
            step.wait(step.launch("exchange", each))


def _sent(layout: TrainingLayout, nbytes: int, gradients: bool = False) -> int:
    """Bytes on the wire of so many bytes of parameters or gradients in shards."""
    shares = [each.bytes_per_element / FP32.bytes_per_element for each in wire_formats(layout.wire)]
    return round(nbytes * shares[0 if gradients else 1])


@functools.lru_cache(maxsize=1)
def _schedule(stages: int, micro_batches: int) -> Schedule:
    return make_schedule("1f1b", stages, micro_batches)
