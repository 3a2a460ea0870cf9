"""``hvd-ckpt bench shard``.

Exit status 0 if this library did all that it was asked for, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.bench.harness.options import BenchRun, bench_command
from hvd_ckpt.bench.harness.report import device_name
from hvd_ckpt.bench.harness.settings import (
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
    from hvd_ckpt.bench.shard.job import Training
    from hvd_ckpt.bench.shard.results import Result

PEERS = ("ddp", "zero", "fsdp2", "deepspeed")
NOBODY = "none"
VOCABULARY = 320  # bytes, and a separator of files; a multiple of 64
# Sizes of the model; micro-batches of a step; MiB of a bucket.
FULL = ({"width": 256, "layers": 6, "heads": 8, "length": 128}, 4, 4.0)
QUICK = ({"width": 64, "layers": 2, "heads": 2, "length": 32}, 2, 0.25)
FOR_WIRE = ({"width": 96, "layers": 3, "heads": 4, "length": 64, "batch": 8}, 1, 1.0)


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
        from hvd_ckpt.bench.shard.engines import Samples

        check_devices(self.device, self.ranks)
        if self.chart is not None and not Path(self.chart).parent.is_dir():
            raise BadArgument(f"--chart: there is no folder '{Path(self.chart).parent}'")
        try:
            Samples(self.training, 0, 1)  # also encodes the text, once for all ranks
        except ValueError as error:
            raise BadArgument(f"--text: {error}") from None

    @property
    def training(self) -> Training:
        """What all configurations train."""
        from hvd_ckpt.bench.harness.workloads import Gpt
        from hvd_ckpt.bench.shard.job import Training

        sizes, passes, bucket_mb = QUICK if self.quick else FOR_WIRE if self.wire else FULL
        model = Gpt(vocabulary=VOCABULARY, **{"batch": 1, **sizes})
        return Training(model, self.accumulate or passes, bucket_mb, self.text, self.device)

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        from hvd_ckpt.processes.runtime import threads_per_rank

        return threads_per_rank(self.ranks)


@bench_command("shard", width=200, settings=Settings)
def shard(run: BenchRun, settings: Settings) -> None:
    """Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

    A GPT-lite is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent.
    Run it on a machine that does nothing else.
    """
    (_wire if settings.wire else _stages)(run, settings)


def _stages(run: BenchRun, settings: Settings) -> None:
    """Measure the memory of each engine in a job of its own, then time all that have not failed; ``quick``: in one job."""
    from hvd_ckpt.bench.shard.job import ENGINES, Findings, ShardJob, configurations
    from hvd_ckpt.bench.shard.results import NOTES, PICTURE, Result, Results

    training = settings.training
    elements = sum(parameter.numel() for parameter in training.model.chain().parameters())
    everyone = configurations([int(stage) for stage in settings.stages], settings.peers)
    results = Results(
        settings.ranks, training.passes, elements, [Result(configuration) for configuration in everyone]
    )

    def measure(what: str, name: str, chosen: Sequence[Result], rounds: int, *, memory: bool = True) -> None:
        configurations = tuple(result.configuration for result in chosen)
        job = ShardJob(run.jobs / name, settings.ranks, configurations, training, memory, rounds)
        ranks = progress.job(what, job, dict[str, Findings], name=name, threads=settings.threads)
        if ranks:
            results.take(ranks, chosen, memory=memory)
        elif rounds:
            results.failure = run.failures[name]
        else:
            for result in chosen:
                result.failure = run.failures[name]

    engines = dict.fromkeys(configuration.engine for configuration in everyone)
    with run.progress(1 if settings.quick else 1 + len(engines)) as progress:
        if settings.quick:
            measure("memory and time", "quick", results.all, settings.rounds)
        else:
            for engine in engines:
                mine = [result for result in results.all if result.configuration.engine == engine]
                measure(f"memory of {ENGINES[engine][0]}", engine, mine, 0)
            measure("time", "time", results.shown, settings.rounds, memory=False)

    def draw(folder: Path) -> list[str]:
        if settings.chart is not None:
            results.draw(Path(settings.chart))
        return [results.draw(folder / PICTURE)]

    report = run.report(
        "Sharding beside PyTorch's and DeepSpeed's",
        [results.time_table(), results.memory_table()],
        results.for_programs(),
        {**_facts(settings), "model": f"{elements} parameters"},
        notes=NOTES,
        draw=draw,
    )
    report.remarks = results.remarks()
    run.finish(report, results.sound)


def _wire(run: BenchRun, settings: Settings) -> None:
    """Train in each wire format."""
    from hvd_ckpt.bench.shard.wire import FORMATS, STAGES, Run, WireJob, wire_table

    job = WireJob(run.jobs / "wire", settings.ranks, settings.training, settings.steps, settings.seeds)
    with run.progress(1) as progress:
        what = f"{len(FORMATS) * len(STAGES) * settings.seeds} runs"
        ranks = progress.job(what, job, list[Run], name="no result", threads=settings.threads)
    table, results = ([wire_table(ranks[0])], ranks[0]) if ranks else ([], None)
    run.finish(run.report("Wire formats", table, results, _facts(settings)))


def _facts(settings: Settings) -> dict[str, Any]:
    training = settings.training
    sizes, _, bucket_mb = QUICK if settings.quick else FOR_WIRE if settings.wire else FULL
    return {
        "ranks": f"{settings.ranks} over {settings.controller}",
        "device": device_name(settings.device),
        "sizes": ", ".join(f"{name} {value}" for name, value in sizes.items()),
        "step": f"{training.passes} micro-batches of {training.model.batch} samples on each rank; buckets of {bucket_mb:g} MiB",
        "threads per rank": settings.threads,
        **({"steps of a run": settings.steps} if settings.wire else {}),
    }
