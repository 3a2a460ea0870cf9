"""Layouts of a training job that fit a memory, and the time of their steps: :func:`layouts`.

A layout says how ranks share a global batch and a model: the stage of sharding, offloading, pipeline stages, parts of layers and
micro-batches. All of them compute the same gradients. For each one, what is left of the memory beside the states and the buffers of
communication is the budget of a plan (:mod:`.computation`), and a step is predicted from the passes of that plan and what its
collectives send (:mod:`.step_time`). There are a few hundred layouts, so all of them are tried.

DeepSpeed's autotuner runs a job for each; Alpa (Zheng et al., 2022) and Galvatron (Miao et al., 2022) search larger spaces for
models that they compile or that are written for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.agreement import errors_on_all, of_all_processes, of_first_process
from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.parallel.pipeline.stages import StageLayout
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.prediction import links
from hvd_ckpt.prediction.computation import Computation, Passes, as_part, counted, measured
from hvd_ckpt.prediction.measured_memory import Update, make_optimizer
from hvd_ckpt.prediction.memory import Estimator
from hvd_ckpt.prediction.memory_estimate import LocalMemory, MemoryEstimate
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes, StepTime
from hvd_ckpt.prediction.training_layout import LayoutRow, TrainingLayout
from hvd_ckpt.processes import parts, watchdog
from hvd_ckpt.utils.elementwise import check_elementwise
from hvd_ckpt.utils.text import STAGES

SHARES = (1, 2, 4)  # micro-batches of a step for each stage and part: more are slower and save little
TFLOPS = 50.0  # of a rank that is not there
EVERY = 50  # steps of local SGD between two averages
NOTABLE = 0.15  # of a step: what takes more limits it
UPDATE = Update(0.0, 28 / 1e12)  # where nothing is measured: Adam reads and writes 28 bytes for each float32
OFFLOADED_BYTES = 16  # of them that pass the bus if its state is in host memory
BUS_BYTES_PER_SECOND = 12e9
FILE_BYTES_PER_SECOND = 2e9  # of mapped files, whose pages a processor finds again in each step

# What a computation depends on: parts of layers, samples, whether a head may be in chunks.
_Key = tuple[int, int, bool]


@dataclass
class Job:
    """What layouts are for; further attributes are as for :func:`layouts`.

    Attributes:
        memory: bytes of each rank.
        sample: makes a batch of so many samples, where the model is.
        optimizer: makes that of a model, or gives its name, as for :func:`hvd_ckpt.estimate_memory`.
        averaged: whether there is an average of the weights.
        replicas: logical replicas of the job, of which each rank computes its share one after the other.
        update: seconds of the optimizer's step.
        rank: this process's in a job that is measured, of which the first answers; None where nothing is measured, and
            operations and saved tensors are counted, which takes no time or memory.
        say: called with a line of text for each measurement.
        refused: by number of parts, why layers cannot be split so.
    """

    model: nn.Module
    batch: int
    memory: int
    ranks: int
    network: Network
    sample: Callable[[int], Sample]
    optimizer: Callable[[nn.Module], str | torch.optim.Optimizer] = lambda model: "adamw"
    precision: str = "fp32"
    averaged: bool = False
    tflops: float = TFLOPS
    replicas: int | None = None
    update: Update = UPDATE
    rank: int | None = None
    say: Callable[[str], None] = lambda text: None
    inexact: bool = False
    refused: dict[int, str] = field(default_factory=dict)
    _parts: dict[int, tuple[nn.Module, Estimator]] = field(default_factory=dict)
    _computations: dict[_Key, Computation] = field(default_factory=dict)

    def measured(self) -> Job:
        """The job with the ranks of this one, and an update that is measured. Collective."""
        return dataclasses.replace(
            self,
            update=Update.measure(self.optimizer(self.model), self.model),
            ranks=hvd.size(),
            rank=hvd.rank(),
        )

    def rows(self) -> list[LayoutRow]:
        """All layouts: those that fit, the fastest first, then the others, that with the least memory first. Collective in a job
        that is measured.

        Raises:
            ValueError: the model has no blocks, or there is no such optimizer or precision.
        """
        self._part(1)  # whose errors come before measurements
        wanted = dict.fromkeys(map(self._key, self.layouts()))
        missing = [key for key in wanted if key not in self._computations]
        if self.rank is None:
            self._compute(missing)
            return self._sorted()
        rows: list[LayoutRow] = []
        with watchdog.unlimited():
            # Each rank that works alone measures some; the others would only take its processors.
            ranks = of_all_processes(links.works_alone(), "hvd_ckpt.layouts.ranks")
            working = [rank for rank, works in enumerate(ranks) if works]
            own = missing[working.index(self.rank) :: len(working)] if self.rank in working else []
            with errors_on_all("hvd_ckpt.layouts.computed"):
                self._compute(own)
            found = {key: self._computations[key] for key in own if key in self._computations}
            for computations, refused in of_all_processes((found, self.refused), "hvd_ckpt.layouts.found"):
                self._computations |= computations
                self.refused |= refused
            with errors_on_all("hvd_ckpt.layouts.sorted"):
                if self.rank == 0:
                    rows = self._sorted()
            rows[:] = of_first_process(rows, "hvd_ckpt.layouts")
        return rows

    def _key(self, layout: TrainingLayout) -> _Key:
        return layout.tensor, layout.samples(self.batch), layout.chunk_head

    def _compute(self, keys: Sequence[_Key]) -> None:
        # Ctrl-C ends the search, and what is known is the answer.
        with contextlib.suppress(KeyboardInterrupt):
            for key in keys:
                tensor = key[0]
                if tensor in self.refused:
                    continue
                try:
                    with parts.alone(tensor) if tensor > 1 else contextlib.nullcontext():
                        self._computations[key] = self._computed(*key)
                except ValueError as error:
                    if tensor == 1:
                        raise
                    self.refused[tensor] = str(error)

    def _computed(self, tensor: int, samples: int, chunk_head: bool) -> Computation:
        part, sample = self._part(tensor)[0], self.sample(samples)
        if self.rank is None:
            return counted(part, sample, self.tflops * 1e12)
        what = f"{samples} samples{f', {tensor} parts' if tensor > 1 else ''}"
        options = {"autocast": AUTOCAST.get(self.precision), "chunk_head": chunk_head}
        return measured(part, sample, lambda text: self.say(f"{what}: {text}"), **options)

    def _part(self, tensor: int) -> tuple[nn.Module, Estimator]:
        """The model, or the first of so many parts of each of its layers, with estimates of its memory."""
        if tensor not in self._parts:
            with as_part(self.model, tensor) as part:
                self._parts[tensor] = (
                    part,
                    Estimator(part, self.optimizer(part), self.precision, averaged=self.averaged),
                )
        return self._parts[tensor]

    def _sorted(self) -> list[LayoutRow]:
        found: list[LayoutRow] = []
        with contextlib.suppress(KeyboardInterrupt):
            # An interrupt leaves those that were there.
            found.extend(filter(None, map(self._row, self.layouts())))
        return sorted(
            found, key=lambda row: (not row.fits, row.seconds if row.fits else row.peak, len(str(row.layout)))
        )

    def layouts(self) -> Iterator[TrainingLayout]:
        """Layouts that divide ranks and batch. Parts of a layer stay within a host."""
        host = min(self.network.local, self.ranks)
        near = [number for number in _divisors(self.ranks) if host % number == 0]
        for tensor in near:
            for stages in _divisors(self.ranks // tensor):
                replicas = self.ranks // tensor // stages
                logical = max((self.replicas or replicas) // replicas, 1)
                for number in sorted({stages} | {stages * tensor * share for share in SHARES}):
                    count = number * logical
                    if self.batch % (replicas * count):
                        continue
                    # A gradient that stages share is whole on each of them.
                    most = 2 if stages > 1 and self._has_shared else len(STAGES)
                    most = most if replicas > 1 and self._splits_state else 1
                    for shard in STAGES[:most]:
                        for offload in (None, "optimizer") if shard != "none" else (None,):
                            layout = TrainingLayout(self.ranks, shard, offload, stages, tensor, count)
                            yield from self._inexact(layout) if self.inexact else [layout]

    def _inexact(self, layout: TrainingLayout) -> Iterator[TrainingLayout]:
        """What changes the results of a layout."""
        if layout.tensor > 1 or layout.stages > 1:
            return
        if layout.shard in STAGES[2:]:
            yield dataclasses.replace(layout, wire="int8")
        if layout.shard == "none" and self.ranks > 1:
            yield dataclasses.replace(layout, every=EVERY)
        if self.rank is not None:
            yield dataclasses.replace(layout, chunk_head=True)

    @functools.cached_property
    def _splits_state(self) -> bool:
        try:
            check_elementwise(make_optimizer(self.optimizer(self.model), self.model), promised=True)
        except ValueError:
            return False
        return True

    @functools.cached_property
    def _has_shared(self) -> bool:
        users = Counter(parameter for block in self.model.children() for parameter in block.parameters())
        return max(users.values(), default=0) > 1

    def _row(self, layout: TrainingLayout) -> LayoutRow | None:
        computation = self._computations.get(self._key(layout))
        if computation is None:
            return None
        part, estimator = self._part(layout.tensor)
        local = LocalMemory(layout.ranks, {"every": layout.every}) if layout.every else None
        slots = _slots(layout, computation, part)

        def estimate(activations: int = 0) -> MemoryEstimate:
            return estimator.estimate(
                layout.replicas,
                layout.shard,
                layout.offload,
                layout.wire,
                activations=activations + slots,
                micro_batches=layout.micro_batches,
                local=local,
            )

        if layout.stages > 1:
            if not computation.in_chain or layout.stages > len(computation.names):
                return None
            return self._in_stages(layout, computation, part, estimate(), slots)
        beside = estimate(self.memory).peak - self.memory
        budget = self.memory - beside
        passes = computation.passes(budget) if estimate().peak <= self.memory else None
        # A model is whole before it is split, and its weights stay until the parts were compared with it. The
        # comparison itself takes memory only where that is free.
        start = nbytes_of(part) + nbytes_of(self.model) if layout.tensor > 1 else 0

        def row(fits: bool, activations: int, budget: int | None) -> LayoutRow:
            found = estimate(activations)
            unrecorded = found.unrecorded + slots
            return LayoutRow(layout, fits, max(found.peak, start), budget, unrecorded=unrecorded)

        if passes is None or start > self.memory:
            return row(False, computation.smallest, computation.smallest)
        return self._timed(row(True, passes.peak, budget if passes.planned else None), computation, passes)

    def _in_stages(
        self,
        layout: TrainingLayout,
        computation: Computation,
        part: nn.Module,
        states: MemoryEstimate,
        slots: int,
    ) -> LayoutRow:
        trained = sum(parameter.nbytes for parameter in part.parameters() if parameter.requires_grad)
        frozen = (nbytes_of(part) - trained) / (layout.replicas if layout.shard == "parameters" else 1)
        scale = (states.model_state + states.averages - frozen) / trained
        staged = StageLayout(layout.stages, layout.micro_batches, param_scale=scale)
        beside = states.buckets // layout.stages + slots
        budget = self.memory - beside
        smallest, pipeline = computation.stages(part, staged, budget)
        if pipeline is None:
            return LayoutRow(layout, False, smallest + beside, smallest, unrecorded=slots)
        forward = [stage.forward_seconds for stage in pipeline.parts]
        backward = [stage.backward_seconds for stage in pipeline.parts]
        again = max(sum(forward) + sum(backward) - computation.kept.seconds, 0.0)
        row = LayoutRow(layout, True, max(pipeline.memory) + beside, budget, unrecorded=slots)
        return self._timed(row, computation, Passes(0, forward, backward, again / layout.stages))

    def _timed(self, row: LayoutRow, computation: Computation, passes: Passes) -> LayoutRow:
        """The row with the time of its step."""
        layout, staged = row.layout, row.layout.stages > 1
        count = layout.micro_batches
        forward, backward = ([each * count * layout.tensor for each in seconds] for seconds in passes[1:3])
        sizes = ModelSizes(
            self.model,
            forward,
            backward,
            activation=computation.boundary * count,
            blocks=computation.blocks(self.model),
            cuts=passes[1:3] if staged else None,
        )
        step = sizes.step(StepTime(self.network, layout))
        steps = layout.every or 1
        seconds = self._beside_each_other(step, staged)
        recomputing = passes.recomputing * count * steps / (step.seconds or 1.0)
        return dataclasses.replace(
            row,
            seconds=seconds / steps + self._update_seconds(layout),
            recomputing=recomputing,
            limit=_limit(seconds - step.computing - step.bubble, step.bubble, recomputing, seconds),
        )

    def _beside_each_other(self, step: StepTime, staged: bool) -> float:
        """Seconds of a step on shared processors."""
        computing = self.network.crowding * step.computing
        exposed = step.seconds - step.computing
        behind = max(step.communicating - exposed, 0.0) * (1 - self.network.hidden)
        # Ranks take as long as their work together, also where stages wait for each other.
        return behind + (max(step.seconds, computing) if staged else computing + exposed)

    def _update_seconds(self, layout: TrainingLayout) -> float:
        number = layout.stages * (1 if layout.shard == "none" else layout.replicas)
        elements = sum(parameter.numel() for parameter in self.model.parameters()) / layout.tensor / number
        bus = 0.0
        if layout.offload:
            on_cpu = next(self.model.parameters()).device.type == "cpu"
            bus = OFFLOADED_BYTES / (FILE_BYTES_PER_SECOND if on_cpu else BUS_BYTES_PER_SECOND)
        each = len(list(self.model.parameters())) / number * self.update.parameter
        return each + elements * (self.update.element + bus)


def layouts(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    *,
    batch: int,
    memory: int | str,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    ranks: int | None = None,
    network: Network | None = None,
    tflops: float = TFLOPS,
    inexact: bool = False,
) -> list[LayoutRow]:
    """The layouts in which a job can train a model, with the memory of a rank and the time of a step.

    In a job, links and computation are measured, and the call is collective. With ``ranks``, the job need not exist: nothing is
    measured, and the model, a chain, may be on the meta device.

    Args:
        model: the model before :func:`hvd_ckpt.tensor_parallel` and ``DistributedOptimizer``, on its device.
        make_sample: takes a number of samples and returns the model's arguments, a tensor or a tuple of tensors.
        batch: samples of a step of all ranks. It stays the same, and so do results.
        memory: of each rank, in bytes or as text such as ``"3GiB"``.
        loss: loss of the model's output, as for :func:`hvd_ckpt.plan`.
        optimizer, precision: as for :func:`hvd_ckpt.estimate_memory`; the optimizer by its name.
        ranks: of a job that need not exist.
        network: what connects these ranks, by default hosts of 8 ranks with 25 Gbit/s.
        tflops: operations of each of these ranks, in TFLOP/s.
        inexact: the layouts that change results, in place of those that do not: a lossy format of messages (int8), local SGD,
            and in a job a head in chunks.

    Returns:
        The layouts that fit, the fastest first, then the others, that which needs least memory first. Those that do not divide
        ``batch`` or the model are left out.

    Raises:
        ValueError: an argument is invalid, or the model has no blocks.
    """
    for name, value in (("batch", batch), ("ranks", 1 if ranks is None else ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a number from 1, not {value!r}")
    if not tflops > 0:
        raise ValueError(f"tflops must be > 0, not {tflops!r}")
    if network is not None and not isinstance(network, Network):
        raise ValueError(f"network must be a hvd_ckpt.prediction.network.Network, not {network!r}")
    if network is not None and ranks is None:
        raise ValueError("network: it is measured in a job; give ranks, their number, as well")
    limit = parse_budget(memory)
    if limit.kind != "bytes":
        raise ValueError(f"memory must be bytes, such as '3GiB', not {memory!r}")

    def sample(count: int) -> Sample:
        made = make_sample(count)
        return Sample(made if isinstance(made, tuple) else (made,), {}, loss)

    given = Job(
        model,
        batch,
        int(limit.value),
        ranks or 1,
        links.measure() if ranks is None else network or Network(),
        sample,
        lambda model: optimizer,
        precision,
        tflops=tflops,
        inexact=inexact,
    )
    return (given.measured() if ranks is None else given).rows()


def nbytes_of(model: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _slots(layout: TrainingLayout, computation: Computation, part: nn.Module) -> int:
    """Bytes of shared memory in which parts of a layer send, which stays: slots of each size for both directions."""
    largest = max(
        *(layout.tensor * block.output for block in computation.chain),
        *(parameter.nbytes for parameter in part.parameters()),
    )
    # Of sizes that double, the smaller ones take as much together as the largest one.
    return (layout.tensor - 1) * 2 * 2 * (1 << (largest - 1).bit_length())


def _limit(exposed: float, waits: float, recomputing: float, seconds: float) -> str:
    if max(exposed, waits) > NOTABLE * seconds:
        return "link" if exposed > waits else "waiting for stages"
    return "memory" if recomputing > NOTABLE else "computation"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
