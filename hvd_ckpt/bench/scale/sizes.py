"""Traces from a model's sizes alone, for models that do not fit here: of this library, and of the baselines.

Buckets, groups and units are laid out by the library's own functions, from a model on the meta device. Computation takes as long as
its floating-point operations at a stated rate; every layer is recomputed in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvd_ckpt.app.models.gpt import GPTBlock, gpt
from hvd_ckpt.bench.scale.record import MODES
from hvd_ckpt.bench.scale.trace import Kind, Trace
from hvd_ckpt.planning.schedule import make_schedule, timeline
from hvd_ckpt.reduction.assignment import lay_out
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.reduction.late import ControlFlags
from hvd_ckpt.reduction.weights import Maxima, Sums
from hvd_ckpt.sharding.flags import ShardFlags
from hvd_ckpt.sharding.in_flight import IN_FLIGHT, SMALL_BYTES
from hvd_ckpt.sharding.layout import RUN_BYTES, Group, Layout
from hvd_ckpt.sharding.units import find_units

CAP = 25 * MEBIBYTE  # of a bucket, the default of all engines
BASELINES = {"ddp": "PyTorch DDP", "fsdp2": "PyTorch FSDP2", "ring": "ring reduce-scatter"}
"""Other engines, whose collectives are rings that wait for no cycle. The last one has gradients in shards, as ZeRO-2."""


@dataclass(frozen=True)
class Split:
    """How ranks train together, beside the mode.

    Attributes:
        ranks: of the job.
        stages, tensor: pipeline stages and parts, in their modes.
        micro_batches: of a step in stages.
        every: steps between two averages of local SGD.
    """

    ranks: int
    stages: int = 8
    tensor: int = 8
    micro_batches: int = 32
    every: int = 50


class Sizes:
    """A GPT without values, and the seconds of its blocks.

    Args:
        arguments: of :func:`hvd_ckpt.app.models.gpt.gpt`.
        batch: sequences of a rank in a step.
        rate: floating-point operations a second.

    Attributes:
        nbytes: of all parameters.
        forward, backward: seconds of each block; the latter with its recomputation.
    """

    def __init__(self, arguments: dict[str, Any], batch: int, rate: float) -> None:
        with torch.device("meta"):
            self._model = gpt(**arguments, checkpoint_interval=1)
        self._named = list(self._model.named_parameters())
        self.nbytes = sum(parameter.nbytes for _, parameter in self._named)
        self._tokens, self._length = batch * arguments["length"], arguments["length"]
        self._width = arguments["width"]
        blocks = list(self._model)
        self.forward = [self._operations(block) / rate for block in blocks]
        # The recomputation takes one forward pass, and the gradients of inputs and of weights another one each.
        self.backward = [3 * seconds for seconds in self.forward]
        # A parameter of two blocks has its gradient when the backward pass is through the first one.
        self._block_of = {
            id(parameter): number
            for number, block in reversed(list(enumerate(blocks)))
            for parameter in block.parameters()
        }

    def _operations(self, block: nn.Module) -> float:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        matrices = sum(module.weight.numel() for module in linear)
        # All pairs count, as in the formulas of Megatron-LM and PaLM by which rates are stated, although half would do if causal.
        attention = 2 * self._length * self._width if isinstance(block, GPTBlock) else 0
        return float(2 * self._tokens * (matrices + attention))

    def take(self, seconds: float) -> None:
        """Makes the forward and backward passes take so long in all."""
        factor = seconds / sum(self.forward + self.backward)
        self.forward, self.backward = (
            [factor * taken for taken in blocks] for blocks in (self.forward, self.backward)
        )

    def trace(self, mode: str, split: Split) -> Trace:
        """The trace of a step in a mode of :data:`MODES`, or of one of :data:`BASELINES`."""
        title = BASELINES.get(mode) or MODES[mode][0]
        trace = Trace(title, queue=mode not in BASELINES)
        if mode in ("parameters", "fsdp2"):
            self._sharded_parameters(trace, split, "reduce_scatter" if mode == "fsdp2" else "scatter")
        elif mode in ("gradients", "ring"):
            self._forward(trace)
            self._scattered(trace, split, "reduce_scatter" if mode == "ring" else "scatter")
        elif mode == "local":
            self._averages(trace, split)
        elif mode == "stages":
            self._stages(trace, split)
        elif mode == "tensor":
            self._parts(trace, split)
        else:
            self._forward(trace)
            self._reduced(trace, self.backward, "scatter" if mode == "replicas" else "allreduce")
            if mode == "optimizer":
                self._gather_weights(trace, split.ranks)
        return trace

    def start(self, mode: str) -> Trace:
        """The collectives before the first step: all options and parameters are compared, then rank 0's weights are sent."""
        trace = Trace("start")
        for _ in range(2):
            trace.launch("objects", 512)
        # The optimizer broadcasts in some modes, and the user's own call in all.
        copies = 2 if mode in ("optimizer", "gradients", "local") else 1
        for _, parameter in self._named * copies:
            trace.launch("broadcast", parameter.nbytes)
        return trace

    def _forward(self, trace: Trace) -> None:
        for seconds in self.forward:
            trace.compute(seconds)

    def _buckets(self, parts: int = 1) -> list[tuple[int, int]]:
        """Bytes of each bucket, and the block whose backward pass completes it."""
        parameters = [parameter for _, parameter in self._named]
        # Within a block a parameter that another one shares is the last to be final.
        users = Counter(id(parameter) for block in self._model for parameter in block.parameters())
        block_of = {index: self._block_of[id(parameter)] for index, parameter in enumerate(parameters)}
        order = sorted(block_of, key=lambda index: (-block_of[index], users[id(parameters[index])], -index))
        buckets = lay_out(order, parameters, CAP)
        return [
            (bucket.nbytes // parts, min(self._block_of[id(entry.parameter)] for entry in bucket.entries))
            for bucket in buckets
        ]

    def _reduced(self, trace: Trace, backward: Sequence[float], kind: Kind, parts: int = 1) -> None:
        """A backward pass from which whole gradients are reduced; the last bucket leaves at its end, with the flags."""
        buckets = self._buckets(parts)
        numbers: list[int] = []
        flags = 4 * (len(_flags(ControlFlags, len(self._named))) + Sums.SIZE) if trace.queue else 0
        for block in reversed(range(len(backward))):
            trace.compute(backward[block])
            while len(numbers) < len(buckets) - 1 and buckets[len(numbers)][1] >= block:
                numbers.append(trace.launch(kind, buckets[len(numbers)][0], "bucket"))
        while len(numbers) < len(buckets):
            last = len(numbers) == len(buckets) - 1
            numbers.append(trace.launch(kind, buckets[len(numbers)][0] + flags * last, "bucket"))
        if kind == "scatter":  # parts of sums of replicas, which are then gathered
            numbers = [
                trace.launch("all_gather", trace.operations[number].nbytes, "sums", number)
                for number in numbers
            ]
        trace.wait(*numbers)

    def _layout(self, ranks: int, cap: float = CAP) -> list[Group]:
        return Layout(ranks).add(list(reversed(self._named)), cap)

    def _gather_weights(self, trace: Trace, ranks: int) -> None:
        gathers = _InFlight(trace, "all_gather")
        for group in self._layout(ranks):
            gathers.add(_padded(group))
        gathers.wait()

    def _scattered(self, trace: Trace, split: Split, kind: Kind) -> None:
        """A backward pass of which each rank keeps its shard of the gradients, then the gather of the weights."""
        layout = Layout(split.ranks)
        groups, launched = layout.add(list(reversed(self._named)), CAP), _InFlight(trace, kind)
        done = [
            min(self._block_of[id(parameter)] for parameter in layout.parameters_of([group]))
            for group in groups
        ]
        left = 0
        for block in reversed(range(len(self.backward))):
            trace.compute(self.backward[block])
            while left < len(groups) and done[left] >= block:
                launched.add(_padded(groups[left]))
                left += 1
        self._flags(trace, len(groups))
        launched.wait()
        self._gather_weights(trace, split.ranks)

    def _flags(self, trace: Trace, groups: int) -> None:
        if trace.queue:
            count = len(_flags(ShardFlags, len(self._named), groups)) + Maxima.SIZE
            trace.wait(trace.launch("allreduce", 4 * count, "flags"))

    def _sharded_parameters(self, trace: Trace, split: Split, kind: Kind) -> None:
        """Units are gathered before they run, each while the one before runs, and gradients scattered after they have run."""
        layout = Layout(split.ranks)
        *units, root = [
            sum(map(_padded, layout.add([(str(id(parameter)), parameter) for parameter in unit.parameters])))
            for unit in find_units(self._model)
        ]
        launched = _InFlight(trace, kind)

        def through(order: Sequence[int], seconds: Sequence[float], after: Callable[[int], None]) -> None:
            number = trace.launch("all_gather", units[order[0]], "unit")
            for place, unit in enumerate(order):
                trace.wait(number)
                if place + 1 < len(order):
                    number = trace.launch("all_gather", units[order[place + 1]], "unit")
                trace.compute(seconds[unit])
                after(unit)

        trace.wait(trace.launch("all_gather", root, "root"))
        numbers = range(len(units))
        through(numbers, self.forward, lambda unit: None)
        through(numbers[::-1], self.backward, lambda unit: launched.add(units[unit]))
        launched.add(root)
        self._flags(trace, len(layout.groups))
        launched.wait()

    def _averages(self, trace: Trace, split: Split) -> None:
        trace.steps = split.every
        for _ in range(split.every):
            self._forward(trace)
            for seconds in self.backward:
                trace.compute(seconds)
        gathers: list[int] = []
        for group in self._layout(split.ranks, RUN_BYTES):  # rows to all, and the means of rows to all
            scatter = trace.launch("alltoall", _padded(group), "scatter")
            # As in Averaging._average() two runs are under way at a time: one is added up while the one
            # before is gathered.
            trace.wait(*gathers[-2:-1], scatter)
            gathers.append(trace.launch("all_gather", _padded(group), "gather"))
        trace.wait(*gathers[-2:])

    def _stages(self, trace: Trace, split: Split) -> None:
        """The first of several equal stages: what it computes and waits for, then a message for each other stage, twice."""
        trace.stages, count = split.stages, split.micro_batches
        forward, backward = (
            [sum(seconds) / split.stages / count] * split.stages for seconds in (self.forward, self.backward)
        )
        spans = timeline(make_schedule("1f1b", split.stages, count), forward, backward)[0]
        *others, last = spans
        trace.compute(others[-1].end if others else 0.0)
        activation = self._tokens * self._width * 4 // count
        for _ in range(2 * (split.stages - 1)):
            trace.wait(trace.launch("message", activation, "stages"))
        trace.compute(last.start - (others[-1].end if others else 0.0))
        blocks = [(last.end - last.start) / len(self.backward)] * len(self.backward)
        self._reduced(trace, blocks, "allreduce", split.stages)

    def _parts(self, trace: Trace, split: Split) -> None:
        """Two sums among the parts of a layer in its forward pass, in its recomputation and in its backward pass."""
        trace.tensor = split.tensor
        activation = self._tokens * self._width * 4
        each = activation if split.tensor == 2 else activation // split.tensor
        sums = 1 if split.tensor == 2 else 2

        def exchanges(count: int) -> None:
            for _ in range(count * sums):
                trace.wait(trace.launch("exchange", each, "parts"))

        for seconds in self.forward:
            trace.compute(seconds / split.tensor)
            exchanges(2)
        backward = []
        for seconds in self.backward:
            exchanges(4)
            backward.append(seconds / split.tensor)
        self._reduced(trace, backward, "allreduce", split.tensor)


class _InFlight:
    """Reduce-scatters or gathers, of which this library has few under way at a time."""

    def __init__(self, trace: Trace, kind: Kind) -> None:
        self._trace, self._kind = trace, kind
        self._numbers: list[int] = []

    def add(self, nbytes: int) -> None:
        trace = self._trace
        while trace.queue and len(self._numbers) >= IN_FLIGHT:
            if nbytes + sum(trace.operations[number].nbytes for number in self._numbers) <= SMALL_BYTES:
                break
            trace.wait(self._numbers.pop(0))
        self._numbers.append(trace.launch(self._kind, nbytes, "group"))

    def wait(self) -> None:
        self._trace.wait(*self._numbers)
        self._numbers.clear()


def _padded(group: Group) -> int:
    return group.padded * group.dtype.itemsize


def _flags(kind: type[Any], parameters: int, groups: int = 0) -> torch.Tensor:
    """The control flags of so many parameters and groups."""
    vectors = [[0.0] * parameters] * 2
    others = len(kind._fields) - 2
    if groups:
        vectors += [[0.0] * groups] * 2
        others -= 2
    flags: torch.Tensor = kind(*vectors, *[0.0] * others).tensor()
    return flags
