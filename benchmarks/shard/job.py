"""The configurations that are compared, the settings of the command, and what a rank finds out about a configuration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    check_devices,
    controller_setting,
    device_setting,
    names_of,
    quick_setting,
    setting,
    text_setting,
    timeout_setting,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvd_ckpt.app.compare.runner.workloads import Gpt

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


PEERS = ("ddp", "zero", "fsdp2", "deepspeed")
NOBODY = "none"
VOCABULARY = 320  # bytes, and a separator of files; a multiple of 64


class Scale(NamedTuple):
    """Sizes of the model; micro-batches of a step on each rank; MiB of the largest bucket of gradients."""

    sizes: dict[str, int]
    passes: int
    bucket_mb: float


FULL = Scale({"width": 256, "layers": 6, "heads": 8, "length": 128}, 4, 4.0)
QUICK = Scale({"width": 64, "layers": 2, "heads": 2, "length": 32}, 2, 0.25)
FOR_WIRE = Scale({"width": 96, "layers": 3, "heads": 4, "length": 64, "batch": 8}, 1, 1.0)


@dataclass(frozen=True)
class Settings(BenchSettings):
    """What is measured, and how often."""

    ranks: int = setting("Number of ranks.", 4, quick=2, flag="np")
    stages: tuple[str, ...] = setting(
        "What is split: 1 optimizer state, 2 gradients, 3 parameters.", "0,1,2,3", type=names_of("0123")
    )
    peers: tuple[str, ...] = setting(
        f"Other engines, or {NOBODY}.", ",".join(PEERS), type=names_of((*PEERS, NOBODY))
    )
    accumulate: int | None = setting(
        "Micro-batches of a step.", note="4; with --quick 2, with --wire 1", type=click.IntRange(1)
    )
    rounds: int = setting("Timed steps of each.", 5, quick=2)
    text: str | None = text_setting()
    wire: bool = setting("Train with each wire format instead, and compare losses, errors and bytes.", False)
    steps: int = setting("With --wire: of each run.", 300, quick=10)
    seeds: int = setting("With --wire: runs of each format.", 5, quick=2)
    chart: str | None = setting(
        "For the picture, beside the report's own.",
        type=click.Path(dir_okay=False),
        metavar="FILE",
    )
    device: str = device_setting()
    quick: bool = quick_setting(
        "A tiny model, and everything in one job: shows that it runs, measures little."
    )
    controller: str = controller_setting()
    timeout: float = timeout_setting()

    def check(self) -> None:
        check_devices(self.device, self.ranks)
        if self.chart is not None and not Path(self.chart).parent.is_dir():
            raise BadArgument(f"--chart: there is no folder '{Path(self.chart).parent}'")
        try:
            self.tokens()  # also encodes the text, once for all ranks
        except ValueError as error:
            raise BadArgument(f"--text: {error}") from None

    @property
    def scale(self) -> Scale:
        """What all configurations train, with Adam in float32."""
        return QUICK if self.quick else FOR_WIRE if self.wire else FULL

    @property
    def model(self) -> Gpt:
        """The model's sizes, and the samples of a micro-batch: one, unless the scale says otherwise."""
        from hvd_ckpt.app.compare.runner.workloads import Gpt

        return Gpt(vocabulary=VOCABULARY, **{"batch": 1, **self.scale.sizes})

    @property
    def passes(self) -> int:
        """Micro-batches of a step on each rank."""
        return self.accumulate or self.scale.passes

    def tokens(self) -> NDArray[Any]:
        """The tokens of the text.

        Raises:
            ValueError: the text cannot be read, or is shorter than a sample.
        """
        from hvd_ckpt.app.datasets.tokens import Tokens

        array, length = Tokens(self.text).array, self.model.length
        if len(array) <= length:
            raise ValueError(f"the text has {len(array)} bytes, fewer than one sample of {length}: give more")
        return array

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        from hvd_ckpt.processes.runtime import threads_per_rank

        return threads_per_rank(self.ranks)


@dataclass(frozen=True)
class ShardJob(RankJob):
    """Configurations on one model.

    Attributes:
        configurations: in this order.
        memory: measure the memory and the messages of each configuration by itself.
        rounds: timed steps of each configuration, in turn; 0 for none.
    """

    worker = "benchmarks.shard.worker:measure"
    ends_at_once = True  # the orderly end of several engines in one process takes long

    settings: Settings
    configurations: tuple[Configuration, ...]
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
