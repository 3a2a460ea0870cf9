"""``hvd-ckpt bench shard``.

Exit status 0 if this library did all that it was asked for, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError, run_job
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    check_devices,
    count_option,
    device_option,
    job_options,
    quick_option,
)
from hvd_ckpt.bench.harness.report import Report, device_name, machine_facts

if TYPE_CHECKING:
    from hvd_ckpt.bench.shard.job import Training
    from hvd_ckpt.bench.shard.results import Result

PEERS = "ddp,zero,fsdp2,deepspeed"
NOBODY = "none"
RANKS, QUICK_RANKS = 4, 2
ROUNDS, QUICK_ROUNDS = 5, 2
STEPS, QUICK_STEPS = 300, 10
SEEDS, QUICK_SEEDS = 5, 2
PASSES, QUICK_PASSES = 4, 2
VOCABULARY = 320  # bytes, and a separator of files; a multiple of 64
# Sizes of the model; micro-batches of a step; MiB of a bucket.
FULL = ({"width": 256, "layers": 6, "heads": 8, "length": 128}, PASSES, 4.0)
QUICK = ({"width": 64, "layers": 2, "heads": 2, "length": 32}, QUICK_PASSES, 0.25)
FOR_WIRE = ({"width": 96, "layers": 3, "heads": 4, "length": 64, "batch": 8}, 1, 1.0)


@bench_command("shard", width=200)
@count_option("--np", "ranks", help="Number of ranks.", default=RANKS, quick=QUICK_RANKS)
@click.option(
    "--stages",
    default="0,1,2,3",
    show_default=True,
    help="What is split: 1 optimizer state, 2 gradients, 3 parameters.",
)
@click.option("--peers", default=PEERS, show_default=True, help=f"Other engines, or {NOBODY}.")
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    help=f"Micro-batches of a step.  [default: {PASSES}; with --quick {QUICK_PASSES}, with --wire 1]",
)
@count_option("--rounds", help="Timed steps of each.", default=ROUNDS, quick=QUICK_ROUNDS)
@click.option("--text", metavar="FILE", help="Training text.  [default: the source text of Python's library]")
@click.option(
    "--wire", is_flag=True, help="Train with each wire format instead, and compare losses, errors and bytes."
)
@count_option("--steps", help="With --wire: of each run.", default=STEPS, quick=QUICK_STEPS)
@count_option("--seeds", help="With --wire: runs of each format.", default=SEEDS, quick=QUICK_SEEDS)
@click.option(
    "--chart",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="For the picture, beside the report's own.",
)
@device_option
@quick_option("A tiny model, and everything in one job: shows that it runs, measures little.")
@job_options
def shard(
    run: BenchRun,
    ranks: int,
    stages: str,
    peers: str,
    accumulate: int | None,
    rounds: int,
    text: str | None,
    wire: bool,
    steps: int,
    seeds: int,
    chart: Path | None,
    device: str,
    quick: bool,
    controller: str,
    timeout: float,
) -> None:
    """Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

    A GPT-lite is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent.
    Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.harness.workloads import Gpt
    from hvd_ckpt.bench.shard.engines import Samples
    from hvd_ckpt.bench.shard.job import Training, configurations
    from hvd_ckpt.processes.runtime import threads_per_rank

    chosen = [int(name) for name in split_names("--stages", stages, ("0", "1", "2", "3"))]
    beside = () if peers == NOBODY else split_names("--peers", peers, PEERS.split(","))
    sizes, passes, bucket_mb = QUICK if quick else FOR_WIRE if wire else FULL
    training = Training(
        Gpt(vocabulary=VOCABULARY, **{"batch": 1, **sizes}), accumulate or passes, bucket_mb, text, device
    )
    check_devices(device, ranks)
    if chart is not None and not chart.parent.is_dir():
        raise BadArgument(f"--chart: there is no folder '{chart.parent}'")
    carrier = check_controller(controller)
    try:
        Samples(training, 0, 1)  # also encodes the text, once for all ranks
    except ValueError as error:
        raise BadArgument(f"--text: {error}") from None
    facts = {
        **machine_facts(),
        "ranks": f"{ranks} over {carrier}",
        "device": device_name(device),
        "sizes": ", ".join(f"{name} {value}" for name, value in sizes.items()),
        "step": f"{training.passes} micro-batches of {training.model.batch} samples on each rank; buckets of {bucket_mb:g} MiB",
    }
    how = {"controller": carrier, "timeout": timeout, "threads": threads_per_rank(ranks)}
    if wire:
        _wire(run, ranks, training, steps, seeds, facts, how)
    _stages(run, ranks, training, configurations(chosen, beside), rounds, quick, chart, facts, how)


def _stages(
    run: BenchRun,
    size: int,
    training: Training,
    everyone: list[Any],
    rounds: int,
    quick: bool,
    chart: Path | None,
    facts: dict[str, str],
    how: dict[str, Any],
) -> None:
    """Measure the memory of each engine in a job of its own, then time all that have not failed; ``quick``: in one job."""
    from hvd_ckpt.bench.shard.job import ENGINES, Findings, ShardJob
    from hvd_ckpt.bench.shard.results import NOTES, PICTURE, Result, Results

    elements = sum(parameter.numel() for parameter in training.model.chain().parameters())
    results = Results(size, training.passes, elements, [Result(configuration) for configuration in everyone])

    def measure(chosen: list[Result], name: str, *, memory: bool, rounds: int) -> None:
        job = ShardJob(
            run.jobs / name, size, tuple(one.configuration for one in chosen), training, memory, rounds
        )
        try:
            results.take(run_job(job, dict[str, Findings], **how), chosen, memory=memory)
        except JobError as error:
            if rounds:
                results.failure = str(error)
            for one in () if rounds else chosen:
                one.failure = str(error)

    engines = list(dict.fromkeys(configuration.engine for configuration in everyone))
    with run.progress(1 if quick else 1 + len(engines)) as progress:
        if quick:
            progress.start("memory and time")
            measure(results.all, "quick", memory=True, rounds=rounds)
        else:
            for engine in engines:
                progress.start(f"memory of {ENGINES[engine][0]}")
                mine = [one for one in results.all if one.configuration.engine == engine]
                measure(mine, engine, memory=True, rounds=0)
            progress.start("time")
            measure(results.shown, "time", memory=False, rounds=rounds)

    def draw(folder: Path) -> list[str]:
        if chart is not None:
            results.draw(chart)
        return [results.draw(folder / PICTURE)]

    facts |= {
        "rounds": str(rounds),
        "model": f"{elements} parameters",
        "threads per rank": str(how["threads"]),
    }
    tables = [results.time_table(), results.memory_table()]
    found = results.for_programs()
    report = Report(
        "Sharding beside PyTorch's and DeepSpeed's", facts, tables, found, results.remarks(), NOTES, draw=draw
    )
    run.finish(report, results.sound)


def _wire(
    run: BenchRun,
    size: int,
    training: Training,
    steps: int,
    seeds: int,
    facts: dict[str, str],
    how: dict[str, Any],
) -> None:
    """Train in each wire format."""
    from hvd_ckpt.bench.shard.wire import FORMATS, STAGES, Run, WireJob, wire_table

    report = Report("Wire formats", {**facts, "steps of a run": str(steps)}, [])
    with run.progress(1) as progress:
        progress.start(f"{len(FORMATS) * len(STAGES) * seeds} runs")
        try:
            runs = run_job(WireJob(run.jobs / "wire", size, training, steps, seeds), list[Run], **how)[0]
            report.tables, report.results = [wire_table(runs)], runs
        except JobError as error:
            report.remarks.append(f"no result: {error}")
    run.finish(report, bool(report.tables))
