"""The configurations that are compared, the training that they do, and what a rank finds out about them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hvd_ckpt.bench.harness.jobs import RankJob
from hvd_ckpt.bench.harness.workloads import Gpt

OURS = "hvd_ckpt"
ENGINES: dict[str, tuple[str, tuple[int, ...]]] = {
    OURS: ("hvd_ckpt", (0, 1, 2, 3)),
    "ddp": ("DDP", (0,)),
    "zero": ("ZeroRedundancyOptimizer", (1,)),
    "fsdp2": ("FSDP2", (2, 3)),
    "deepspeed": ("DeepSpeed", (1, 2, 3)),
}
"""Titles and stages of the engines."""


@dataclass(frozen=True)
class Configuration:
    """One way to train.

    Attributes:
        engine: a name in :data:`ENGINES`.
        stage: 0 to 3.
        recompute: each block is recomputed in the backward pass.
        offload: the optimizer's state is on disk.
    """

    engine: str
    stage: int
    recompute: bool = False
    offload: bool = False

    @property
    def ours(self) -> bool:
        return self.engine == OURS

    @property
    def name(self) -> str:
        """Unique, of letters that a file's name may have."""
        parts = [self.engine, str(self.stage), *["offload"] * self.offload, *["recompute"] * self.recompute]
        return "-".join(parts)

    @property
    def title(self) -> str:
        """For people, without the recomputation."""
        return f"{ENGINES[self.engine][0]}, stage {self.stage}{' + offload' * self.offload}"

    def is_baseline_of(self, ours: Configuration) -> bool:
        """Whether it does the same as a configuration of this library; nothing does the same as its offload."""
        same = (self.stage, self.recompute) == (ours.stage, ours.recompute)
        return same and ours.ours and not ours.offload and not self.ours


def configurations(stages: Collection[int], peers: Collection[str]) -> list[Configuration]:
    """This library and its ``peers`` at these stages, with and without recomputation; at stage 3 with its offload, too."""
    chosen = []
    for stage in sorted(stages):
        for offload in (False, True) if stage == 3 else (False,):
            chosen += [Configuration(OURS, stage, recompute, offload) for recompute in (False, True)]
        for engine, (_, known) in ENGINES.items():
            if stage in known and engine in peers:
                chosen += [Configuration(engine, stage, recompute) for recompute in (False, True)]
    return chosen


@dataclass(frozen=True)
class Training:
    """The training that all configurations do: micro-batches of one sample, with Adam in float32.

    Attributes:
        model: its sizes.
        passes: micro-batches of a step on each rank.
        bucket_mb: largest bucket of gradients, in MiB.
        text: a file; None for the source text of the Python standard library.
        device: ``cpu`` or ``cuda``.
    """

    model: Gpt
    passes: int
    bucket_mb: float
    text: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class ShardJob(RankJob):
    """Configurations on one model.

    Attributes:
        configurations: in this order.
        training: the model and its steps.
        memory: measure the memory and the messages of each configuration by itself.
        rounds: timed steps of each configuration, in turn; 0 for none.
    """

    worker = "hvd_ckpt.bench.shard.worker"

    configurations: tuple[Configuration, ...]
    training: Training
    memory: bool
    rounds: int


@dataclass
class Findings:
    """The results of one configuration on one rank, in bytes.

    Attributes:
        losses: of each step, the mean over this rank's samples.
        parameters, gradients, state, on_disk: held for training when the gradients are ready, the last in mapped files.
        peak: the most that PyTorch's allocator has given out at a time in the third step, since before the model was built.
        activations: peak of a micro-batch of the bare model above its parameters and gradients.
        counted: sent in a step by the configuration's own count, or by the collectives of ``torch.distributed`` that it calls.
        seconds: of each timed step.
        failure: why there is no more, in one line.
    """

    losses: list[float] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    on_disk: int = 0
    peak: int = 0
    activations: int = 0
    counted: int = 0
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None
