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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
from torch import Tensor, nn

from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.parallel.pipeline.stages import StageLayout
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.planning.plan import PipelinePlan
from hvd_ckpt.prediction import links
from hvd_ckpt.prediction.computation import Computation, Passes, Sample, bubble_of, counted, measured
from hvd_ckpt.prediction.measured_memory import seconds_of_update
from hvd_ckpt.prediction.memory import Estimator, TrainingStep
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes, Split, StepTime
from hvd_ckpt.processes import watchdog
from hvd_ckpt.reduction.agreement import of_first_process
from hvd_ckpt.utils.text import STAGES, show_bytes

SHARES = (1, 2, 4)  # micro-batches of a step for each stage and part: more are slower and save little
TFLOPS = 50.0  # of a rank that is not there
NOTABLE = 0.15  # of a step: what takes more limits it
UPDATE_BYTES_PER_SECOND = 1e12  # of an optimizer's step, where nothing is measured
UPDATE_BYTES = 28  # that Adam reads and writes for each float32
OFFLOADED_BYTES = 16  # of them that pass the bus if its state is in host memory
BUS_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True)
class TrainingLayout:
    """How the ranks of a job share a global batch and a model.

    Attributes:
        ranks: of the job.
        shard, offload: as for :func:`hvd_ckpt.DistributedOptimizer`.
        stages, tensor: as for :func:`hvd_ckpt.init`.
        micro_batches: of a step of each replica.
    """

    ranks: int
    shard: str = "none"
    offload: str | None = None
    stages: int = 1
    tensor: int = 1
    micro_batches: int = 1

    @property
    def replicas(self) -> int:
        """Replicas of the model, among which the batch is divided."""
        return self.ranks // (self.stages * self.tensor)

    def samples(self, batch: int) -> int:
        """Samples of a micro-batch."""
        return batch // (self.replicas * self.micro_batches)

    def __str__(self) -> str:
        words = [f"shard {self.shard}"] if self.shard != "none" else []
        words += [f"offload {self.offload}"] if self.offload else []
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += [f"{self.tensor} parts"] if self.tensor > 1 else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(words) or "data parallel"


@dataclass(frozen=True)
class LayoutRow:
    """A layout with its predicted cost.

    Attributes:
        layout: the layout.
        fits: whether a step stays within the memory.
        peak: bytes of a rank; if it does not fit, the least that it needs.
        budget: of its plan: bytes of activations, in stages of all that a stage holds. None if it needs no recomputation.
        seconds: of a step; 0 if it does not fit.
        recomputing: the part of a step that is recomputation.
        limit: what limits it: ``"computation"``, ``"link"``, ``"waiting for stages"`` or ``"memory"``.
    """

    layout: TrainingLayout
    fits: bool
    peak: int
    budget: int | None = None
    seconds: float = 0.0
    recomputing: float = 0.0
    limit: str = "memory"

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.layout}: needs {show_bytes(self.peak)}"
        return f"{self.layout}: {show_bytes(self.peak)}, {self.seconds:.3f} s ({self.limit})"


@dataclass
class Job:
    """What layouts are for.

    Attributes:
        model: the whole model, which may be on the meta device.
        batch: samples of a step of all ranks.
        memory: bytes of each rank.
        ranks: of the job.
        network: what connects them.
        sample: makes a batch of so many samples, where the model is.
        optimizer, precision: as for :func:`hvd_ckpt.estimate_memory`.
        compute: gives the computation of a sample on the first of so many parts of each layer; raises ``ValueError`` if layers
            cannot be split so.
        update: seconds of the optimizer's step for each element.
        crowding: how much longer a rank computes while all ranks of its host do.
        rank: this process's in a job that is measured, of which the first answers; None where nothing is measured.
        refused: by number of parts, why layers cannot be split so.
    """

    model: nn.Module
    batch: int
    memory: int
    ranks: int
    network: Network
    sample: Callable[[int], Sample]
    optimizer: str = "adamw"
    precision: str = "fp32"
    compute: Callable[[Sample, int], Computation] | None = None
    update: float = UPDATE_BYTES / UPDATE_BYTES_PER_SECOND
    crowding: float = 1.0
    rank: int | None = None
    refused: dict[int, str] = field(default_factory=dict)
    _estimators: dict[int, Estimator] = field(default_factory=dict)
    _computations: dict[tuple[int, int], Computation] = field(default_factory=dict)

    def counted(self, tflops: float = TFLOPS) -> Job:
        """The job with its computation counted in operations, of which a rank does so many TFLOP/s. Takes no time or memory."""

        def compute(sample: Sample, tensor: int) -> Computation:
            return counted(self.model, sample, tensor, tflops * 1e12)

        return dataclasses.replace(self, compute=compute)

    def measured(self, say: Callable[[str], None] = lambda text: None) -> Job:
        """The job with the ranks, links and computation of this one, which are measured. Collective."""
        say("measuring links")
        network = links.measure()
        crowding, rank = links.crowding(), hvd.rank()
        device = next(self.model.parameters()).device

        def compute(sample: Sample, tensor: int) -> Computation:
            samples = next(value.shape[0] for value in sample.args if isinstance(value, Tensor))

            def saying(text: str) -> None:
                say(f"{samples} samples{f', {tensor} parts' if tensor > 1 else ''}: {text}")

            autocast = AUTOCAST.get(self.precision)
            return measured(self.model, sample, tensor, saying, autocast=autocast, chunk_head=False)

        return dataclasses.replace(
            self,
            ranks=hvd.size(),
            network=network,
            compute=compute,
            update=0.0 if rank else seconds_of_update(self.optimizer, device),
            crowding=crowding,
            rank=rank,
        )

    def computation(self, tensor: int, samples: int) -> Computation:
        """That of a micro-batch of so many samples on the first of so many parts of each layer."""
        assert self.compute is not None
        if (tensor, samples) not in self._computations:
            self._computations[tensor, samples] = self.compute(self.sample(samples), tensor)
        return self._computations[tensor, samples]

    def rows(self) -> list[LayoutRow]:
        """All layouts: those that fit, the fastest first, then the others, that with the least memory first. Collective in a job
        that is measured."""
        if self.rank is None:
            return self._sorted()
        answer: Any = None
        if self.rank == 0:
            try:
                answer = self._sorted()
            except Exception as error:  # the other ranks wait for an answer
                answer = error
        with watchdog.unlimited():
            answer = of_first_process(answer, "hvd_ckpt.layouts")
        if isinstance(answer, Exception):
            raise answer
        rows: list[LayoutRow] = answer
        return rows

    def _sorted(self) -> list[LayoutRow]:
        found: list[LayoutRow] = []
        # Ctrl-C ends the search, and what is known is the answer.
        with contextlib.suppress(KeyboardInterrupt):
            for layout in self.layouts():
                row = self._row(layout)
                found += [] if row is None else [row]
        return sorted(
            found, key=lambda row: (not row.fits, row.seconds if row.fits else row.peak, len(str(row.layout)))
        )

    def layouts(self) -> Iterator[TrainingLayout]:
        """Layouts that divide ranks and batch. Parts of a layer stay within a host."""
        near = [number for number in _divisors(self.ranks) if number <= self.network.local]
        for tensor in near:
            for stages in _divisors(self.ranks // tensor):
                replicas = self.ranks // tensor // stages
                for count in sorted({stages} | {stages * tensor * share for share in SHARES}):
                    if self.batch % (replicas * count):
                        continue
                    # A gradient that stages share is whole on each of them.
                    most = 1 if replicas == 1 else 2 if stages > 1 and self._has_shared else len(STAGES)
                    for shard in STAGES[:most]:
                        for offload in (None, "optimizer") if shard != "none" else (None,):
                            yield TrainingLayout(self.ranks, shard, offload, stages, tensor, count)

    @functools.cached_property
    def _has_shared(self) -> bool:
        users = Counter(parameter for block in self.model.children() for parameter in block.parameters())
        return max(users.values(), default=0) > 1

    def _row(self, layout: TrainingLayout) -> LayoutRow | None:
        if layout.tensor in self.refused:
            return None
        try:
            computation = self.computation(layout.tensor, layout.samples(self.batch))
        except ValueError as error:
            if layout.tensor == 1:
                raise
            self.refused[layout.tensor] = str(error)
            return None
        if layout.tensor not in self._estimators:
            step = TrainingStep(optimizer=self.optimizer, precision=self.precision)
            self._estimators[layout.tensor] = Estimator(computation.model, step)
        estimate = functools.partial(
            self._estimators[layout.tensor].estimate, layout.replicas, layout.shard, layout.offload
        )
        if layout.stages > 1:
            if not computation.in_chain or layout.stages > len(computation.blocks):
                return None
            return self._in_stages(layout, computation, estimate())
        beside = estimate(activations=self.memory).peak - self.memory
        budget = self.memory - beside
        passes = computation.passes(budget) if estimate().peak <= self.memory else None
        if passes is None:
            return LayoutRow(layout, False, estimate(activations=computation.smallest).peak)
        peak = estimate(activations=passes.peak).peak
        return self._timed(layout, computation, peak, budget, passes)

    def _in_stages(self, layout: TrainingLayout, computation: Computation, states: Any) -> LayoutRow:
        held = states.parameters + states.gradients + states.optimizer_state + states.master_weights
        whole = sum(parameter.nbytes for parameter in computation.model.parameters())
        staged = StageLayout(layout.stages, layout.micro_batches, param_scale=held / whole)
        beside = states.buckets // layout.stages
        smallest, pipeline = computation.stages(staged, self.memory - beside)
        if pipeline is None:
            return LayoutRow(layout, False, smallest + beside)
        forward, backward = (
            [getattr(part, name) for part in pipeline.parts]
            for name in ("forward_seconds", "backward_seconds")
        )
        passes = Passes(0, forward, backward, 0.0)
        budget = self.memory - beside
        return self._timed(layout, computation, max(pipeline.memory) + beside, budget, passes, pipeline)

    def _timed(
        self,
        layout: TrainingLayout,
        computation: Computation,
        peak: int,
        budget: int,
        passes: Passes,
        pipeline: PipelinePlan | None = None,
    ) -> LayoutRow:
        count = layout.micro_batches
        forward, backward = ([each * count * layout.tensor for each in seconds] for seconds in passes[1:3])
        sizes = ModelSizes(
            self.model,
            forward,
            backward,
            activation=computation.boundary * count,
            blocks=[nn.ModuleList(map(self.model.get_submodule, names)) for names in computation.names],
            cuts=None if pipeline is None else (passes.forward, passes.backward),
        )
        split = Split(layout.ranks, layout.stages, layout.tensor, count)
        step = sizes.step(layout.shard, split, self.network)
        elements = (
            sum(parameter.numel() for parameter in self.model.parameters()) / layout.tensor / layout.stages
        )
        elements /= 1 if layout.shard == "none" else layout.replicas
        bus = OFFLOADED_BYTES / BUS_BYTES_PER_SECOND if layout.offload else 0.0
        # Ranks that share a processor take as long as their work together, also where they wait for each other.
        if pipeline is None:
            seconds, waits = step.seconds + (self.crowding - 1) * step.computing, 0.0
        else:
            seconds, waits = max(step.seconds, self.crowding * step.computing), bubble_of(pipeline)
        recomputing = passes.recomputing * count / step.seconds
        limit = _limit(step, waits, recomputing)
        kept = pipeline is None and not passes.recomputing
        return LayoutRow(
            layout,
            True,
            peak,
            None if kept else budget,
            seconds + elements * (self.update + bus),
            recomputing,
            limit,
        )


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

    Returns:
        The layouts that fit, the fastest first, then the others, that which needs least memory first. Those that do not divide
        ``batch`` or the model are left out.

    Raises:
        ValueError: an argument is invalid, or the model has no blocks.
    """
    limit = parse_budget(memory)
    if limit.kind != "bytes":
        raise ValueError(f"memory must be bytes, such as '3GiB', not {memory!r}")

    def sample(count: int) -> Sample:
        made = make_sample(count)
        return Sample(made if isinstance(made, tuple) else (made,), {}, loss)

    given = Job(
        model, batch, int(limit.value), ranks or 1, network or Network(), sample, optimizer, precision
    )
    if ranks is not None:
        return given.counted(tflops).rows()
    return given.measured().rows()


def _limit(step: StepTime, waits: float, recomputing: float) -> str:
    exposed = max(step.seconds - step.computing - waits, 0.0)
    if max(exposed, waits) > NOTABLE * step.seconds:
        return "link" if exposed > waits else "waiting for stages"
    return "memory" if recomputing > NOTABLE else "computation"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
