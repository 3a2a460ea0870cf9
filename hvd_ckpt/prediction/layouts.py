"""Layouts of a training job that fit a memory, and the time of their steps: :func:`layouts`.

A layout says how ranks share a global batch and a model: the stage of sharding, offloading, pipeline stages, parts of layers and
micro-batches. All of them compute the same gradients. For each one, what is left of the memory beside the states and the buffers of
communication is the budget of a plan (:mod:`.computation`), and a step is predicted from the passes of that plan and what its
collectives send (:mod:`.step_time`). There are a few hundred layouts, so all of them are tried.

DeepSpeed's autotuner runs a job for each; Alpa (Zheng et al., 2022) and Galvatron (Miao et al., 2022) search larger spaces for
models that they compile or that are written for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hvd_ckpt.parallel.pipeline.stages import StageLayout
from hvd_ckpt.planning.plan import PipelinePlan
from hvd_ckpt.prediction.computation import Computation, Passes, bubble_of
from hvd_ckpt.prediction.memory import Estimator, TrainingStep
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes, Split, StepTime
from hvd_ckpt.utils.text import STAGES, show_bytes

SHARES = (1, 2, 4)  # micro-batches of a step for each stage and part: more are slower and save little
NOTABLE = 0.15  # of a step: what takes more limits it
UPDATE_BYTES_PER_SECOND = 1e12  # of an optimizer's step, where nothing is measured
UPDATE_BYTES = 28  # that Adam reads and writes for each float32


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
        computation: gives the computation of a micro-batch of so many samples on the first of so many parts of each layer; raises
            ``ValueError`` if layers cannot be split so.
        update: seconds of the optimizer's step for each element.
        crowding: how much longer a rank computes while all ranks of its host do.
        optimizer, precision: as for :func:`hvd_ckpt.estimate_memory`.
    """

    model: nn.Module
    batch: int
    memory: int
    ranks: int
    network: Network
    computation: Callable[[int, int], Computation]
    update: float = UPDATE_BYTES / UPDATE_BYTES_PER_SECOND
    crowding: float = 1.0
    optimizer: Any = "adamw"
    precision: str = "fp32"
    refused: dict[int, str] = field(default_factory=dict)
    _estimators: dict[int, Estimator] = field(default_factory=dict)

    def rows(self) -> list[LayoutRow]:
        """All layouts: those that fit, the fastest first, then the others, that with the least memory first."""
        found = [row for layout in self.layouts() if (row := self._row(layout)) is not None]
        return sorted(found, key=lambda row: (not row.fits, row.seconds if row.fits else row.peak))

    def layouts(self) -> Iterator[TrainingLayout]:
        """Layouts that divide ranks and batch. Parts of a layer stay within a host."""
        near = [number for number in _divisors(self.ranks) if number <= self.network.local]
        for tensor in near:
            for stages in _divisors(self.ranks // tensor):
                replicas = self.ranks // tensor // stages
                for count in sorted({stages} | {stages * tensor * share for share in SHARES}):
                    if self.batch % (replicas * count):
                        continue
                    for shard in STAGES if replicas > 1 else STAGES[:1]:
                        for offload in (None, "optimizer") if shard != "none" else (None,):
                            yield TrainingLayout(self.ranks, shard, offload, stages, tensor, count)

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
            [getattr(part, name) for part in pipeline.parts] for name in ("forward_seconds", "backward_seconds")
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
        blocks = [nn.ModuleList(map(self.model.get_submodule, names)) for names in computation.names]
        whole = [[each * count * layout.tensor for each in seconds] for seconds in passes[1:3]]
        sizes = ModelSizes(
            self.model,
            *(whole if pipeline is None else [[0.0] * len(blocks)] * 2),
            activation=computation.boundary * count,
            blocks=blocks,
            cuts=None if pipeline is None else (passes.forward, passes.backward),
        )
        split = Split(layout.ranks, layout.stages, layout.tensor, count)
        step = sizes.step(layout.shard, split, self.network)
        elements = sum(parameter.numel() for parameter in self.model.parameters()) / layout.tensor / layout.stages
        update = self.update * elements / (1 if layout.shard == "none" else layout.replicas)
        # Ranks that share a processor take as long as their work together, also where they wait for each other.
        seconds = max(step.seconds, step.seconds + (self.crowding - 1) * step.computing)
        if pipeline is not None:
            seconds = max(step.seconds, self.crowding * step.computing)
        waits = 0.0 if pipeline is None else bubble_of(pipeline)
        recomputing = passes.recomputing * count / step.seconds
        limit = _limit(step, waits, recomputing)
        kept = pipeline is None and not passes.recomputing
        return LayoutRow(layout, True, peak, None if kept else budget, seconds + update, recomputing, limit)


def _limit(step: StepTime, waits: float, recomputing: float) -> str:
    exposed = max(step.seconds - step.computing - waits, 0.0)
    if max(exposed, waits) > NOTABLE * step.seconds:
        return "link" if exposed > waits else "waiting for stages"
    return "memory" if recomputing > NOTABLE else "computation"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
