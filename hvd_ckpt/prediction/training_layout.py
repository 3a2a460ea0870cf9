"""A layout of a training job, and its predicted cost."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ckpt.utils.text import show_bytes


@dataclass(frozen=True)
class TrainingLayout:
    """How the ranks of a job share a global batch and a model.

    Attributes:
        ranks: of the job.
        shard, offload, wire: as for :func:`hvd_ckpt.DistributedOptimizer`.
        stages, tensor: as for :func:`hvd_ckpt.init`.
        micro_batches: of a step of each replica.
        every: steps of local SGD between two averages; 0 without it.
        chunk_head: as for :func:`hvd_ckpt.plan`.
    """

    ranks: int
    shard: str = "none"
    offload: str | None = None
    stages: int = 1
    tensor: int = 1
    micro_batches: int = 1
    wire: str = "fp32"
    every: int = 0
    chunk_head: bool = False

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
        words += [f"wire {self.wire}"] if self.wire != "fp32" else []
        words += [f"local SGD, every {self.every}"] if self.every else []
        words += ["head in chunks"] if self.chunk_head else []
        return ", ".join(words) or "data parallel"


@dataclass(frozen=True)
class LayoutRow:
    """A layout with its predicted cost.

    Attributes:
        layout: the layout.
        fits: whether a step stays within the memory.
        peak: bytes of a rank; if it does not fit, the least that it needs.
        budget: of its plan: bytes of activations, in stages of all that a stage holds. If it does not fit, the
            least for which there is a plan. None if it needs no recomputation.
        seconds: of a step; 0 if it does not fit.
        recomputing: the part of a step that is recomputation.
        limit: what limits it: ``"computation"``, ``"link"``, ``"waiting for stages"`` or ``"memory"``.
        unrecorded: bytes of ``peak`` that no tensor of this process has: what Horovod receives, and memory that parts share.
    """

    layout: TrainingLayout
    fits: bool
    peak: int
    budget: int | None = None
    seconds: float = 0.0
    recomputing: float = 0.0
    limit: str = "memory"
    unrecorded: int = 0

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.layout}: needs {show_bytes(self.peak)}"
        return f"{self.layout}: {show_bytes(self.peak)}, {self.seconds:.3f} s ({self.limit})"
