"""``python -m benchmarks shard``.

Exit status 0 if this library did all that it was asked for, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shard.job import ENGINES, Findings, Settings, ShardJob, configurations
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import device_name

if TYPE_CHECKING:
    from benchmarks.shard.results import Result


@bench_command(Settings, width=200)
def shard(run: BenchRun, settings: Settings) -> None:
    """Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

    A GPT-lite is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent.
    Run it on a machine that does nothing else.
    """
    (_wire if settings.wire else _stages)(run, settings)


def _stages(run: BenchRun, settings: Settings) -> None:
    """Measure the memory of each engine in a job of its own, then time all that have not failed; ``quick``: in one job."""
    from benchmarks.shard.results import NOTES, PICTURE, Result, Results

    elements = sum(parameter.numel() for parameter in settings.model.chain().parameters())
    everyone = configurations([int(stage) for stage in settings.stages], settings.peers)
    results = Results(
        settings.ranks, settings.passes, elements, [Result(configuration) for configuration in everyone]
    )

    def measure(what: str, name: str, chosen: Sequence[Result], rounds: int, *, memory: bool = True) -> None:
        names = tuple(result.configuration for result in chosen)
        job = ShardJob(run.jobs / name, settings.ranks, settings, names, memory=memory, rounds=rounds)
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
    from benchmarks.shard.wire import FORMATS, STAGES, Run, WireJob, wire_table

    job = WireJob(run.jobs / "wire", settings.ranks, settings)
    with run.progress(1) as progress:
        what = f"{len(FORMATS) * len(STAGES) * settings.seeds} runs"
        ranks = progress.job(what, job, list[Run], name="no result", threads=settings.threads)
    table, results = ([wire_table(ranks[0])], ranks[0]) if ranks else ([], None)
    run.finish(run.report("Wire formats", table, results, _facts(settings)))


def _facts(settings: Settings) -> dict[str, Any]:
    scale, samples = settings.scale, settings.model.batch
    return {
        "ranks": f"{settings.ranks} over {settings.controller}",
        "device": device_name(settings.device),
        "sizes": ", ".join(f"{name} {value}" for name, value in scale.sizes.items()),
        "step": f"{settings.passes} micro-batches of {samples} samples on each rank; buckets of {scale.bucket_mb:g} MiB",
        "threads per rank": settings.threads,
        **({"steps of a run": settings.steps} if settings.wire else {}),
    }
