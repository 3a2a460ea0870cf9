"""``hvd-ckpt bench shard``.

Exit status 0 if this library did all that it was asked for, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_ckpt.bench.harness.options import BenchRun, bench_command, count_option, quick_option
from hvd_ckpt.bench.harness.report import Report, machine_facts
from hvd_ckpt.bench.shard.configurations import ENGINES, OURS, Configuration, configurations
from hvd_ckpt.command_line import BadArgument, check_controller, job_options, split_names

if TYPE_CHECKING:
    from hvd_ckpt.bench.shard.results import Result, Results
    from hvd_ckpt.bench.shard.training import Training

__all__ = ["shard"]

PEERS = tuple(name for name in ENGINES if name != OURS)
NOBODY = "none"
RANKS, QUICK_RANKS = 4, 2
ROUNDS, QUICK_ROUNDS = 5, 2
STEPS, QUICK_STEPS = 300, 10
PASSES, QUICK_PASSES = 4, 2
FULL = {"width": 256, "layers": 6, "heads": 8, "length": 128, "passes": PASSES, "bucket_mb": 4.0}
QUICK = {"width": 64, "layers": 2, "heads": 2, "length": 32, "passes": QUICK_PASSES, "bucket_mb": 0.25}
FOR_WIRE = {"width": 128, "layers": 4, "heads": 4, "length": 64, "passes": 1, "bucket_mb": 1.0}


@bench_command("shard", width=200)
@count_option("--np", "ranks", help="Number of ranks.", default=RANKS, quick=QUICK_RANKS)
@click.option(
    "--stages",
    default="0,1,2,3",
    show_default=True,
    help="What is split: 1 optimizer state, 2 gradients, 3 parameters.",
)
@click.option("--peers", default=",".join(PEERS), show_default=True, help=f"Other engines, or {NOBODY}.")
@count_option("--accumulate", help="Micro-batches of a step.", default=PASSES, quick=QUICK_PASSES)
@count_option("--rounds", help="Timed steps of each.", default=ROUNDS, quick=QUICK_ROUNDS)
@click.option(
    "--text",
    metavar="FILE",
    default=None,
    help="Training text.  [default: the source text of Python's library]",
)
@click.option(
    "--wire", is_flag=True, help="Train with each wire format instead, and compare losses, errors and bytes."
)
@count_option("--steps", help="With --wire: of each run.", default=STEPS, quick=QUICK_STEPS)
@click.option(
    "--chart",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="For the picture, beside the report's own.",
)
@quick_option("A tiny model, and everything in one job: shows that it runs, measures little.")
@job_options
def shard(
    run: BenchRun,
    ranks: int | None,
    stages: str,
    peers: str,
    accumulate: int | None,
    rounds: int | None,
    text: str | None,
    wire: bool,
    steps: int | None,
    chart: Path | None,
    quick: bool,
    controller: str,
    timeout: float,
) -> None:
    """Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

    A GPT-lite is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent.
    Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.shard.training import Samples, Training

    size = ranks or (QUICK_RANKS if quick else RANKS)
    chosen = [int(name) for name in split_names("--stages", stages, [str(stage) for stage in range(4)])]
    beside = () if peers == NOBODY else split_names("--peers", peers, PEERS)
    training = Training(**(QUICK if quick else FOR_WIRE if wire else FULL), text=text)  # type: ignore[arg-type]
    training = dataclasses.replace(training, passes=accumulate or training.passes)
    if chart is not None and not chart.parent.is_dir():
        raise BadArgument(f"--chart: there is no folder '{chart.parent}'")
    launcher = _Launcher(run, check_controller(controller), timeout, size, training)
    try:
        Samples(training, 0, 1)  # also encodes the text, once for all ranks
    except ValueError as error:
        raise BadArgument(f"--text: {error}") from None
    if wire:
        launcher.wire(steps or (QUICK_STEPS if quick else STEPS))
    launcher.stages(
        configurations(chosen, beside), rounds or (QUICK_ROUNDS if quick else ROUNDS), quick, chart
    )


@dataclasses.dataclass
class _Launcher:
    """The jobs of one call of the command."""

    run: BenchRun
    controller: str
    timeout: float
    size: int
    training: Training

    def facts(self) -> dict[str, str]:
        training = self.training
        sizes = f"width {training.width}, layers {training.layers}, heads {training.heads}, length {training.length}"
        step = (
            f"{training.passes} micro-batches of 1 sample on each rank; buckets of {training.bucket_mb:g} MiB"
        )
        return {
            **machine_facts(), "ranks": f"{self.size} over {self.controller}", "sizes": sizes, "step": step
        }  # fmt: skip

    def stages(self, everyone: list[Configuration], rounds: int, quick: bool, chart: Path | None) -> None:
        """Measure the memory of each engine in a job of its own, then time all that have not failed; ``quick``: in one job."""
        from hvd_ckpt.bench.shard.results import NOTES, PICTURE, Result, Results

        results = Results(
            self.size, self.training.passes, [Result(configuration) for configuration in everyone]
        )
        engines = list(dict.fromkeys(configuration.engine for configuration in everyone))
        with self.run.progress(1 if quick else 1 + len(engines)) as progress:
            if quick:
                progress.start("memory and time")
                self._take(results, results.all, "quick", memory=True, rounds=rounds)
            else:
                for engine in engines:
                    progress.start(f"memory of {ENGINES[engine][0]}")
                    mine = [one for one in results.all if one.configuration.engine == engine]
                    self._take(results, mine, engine, memory=True, rounds=0)
                progress.start("time")
                self._take(results, results.shown, "time", memory=False, rounds=rounds)

        def draw(folder: Path) -> list[str]:
            for path in filter(None, (chart,)):
                results.draw(path)
            return [results.draw(folder / PICTURE)]

        model = {"model": f"{results.elements} parameters", "threads per rank": str(results.threads)}
        report = Report(
            "Sharding beside PyTorch's and DeepSpeed's",
            {**self.facts(), "rounds": str(rounds), **model},
            [results.time_table(), results.memory_table()],
            results.for_programs(),
            results.remarks(),
            NOTES,
            draw=draw,
        )
        self.run.finish(report, results.sound)

    def _take(self, results: Results, chosen: list[Result], name: str, *, memory: bool, rounds: int) -> None:
        from hvd_ckpt.bench.harness.jobs import JobError, run_job
        from hvd_ckpt.bench.shard.worker import Answer, ShardJob
        from hvd_ckpt.runtime import threads_per_rank

        everyone = tuple(one.configuration for one in chosen)
        job = ShardJob(self.run.jobs / name, self.size, everyone, self.training, memory, rounds)
        try:
            threads = threads_per_rank(self.size)
            answers = run_job(job, Answer, self.controller, self.timeout, threads=threads)
        except JobError as error:
            if rounds:
                results.failure = str(error)
            else:
                for one in chosen:
                    one.failure = str(error)
            return
        results.take(answers, chosen, memory=memory)

    def wire(self, steps: int) -> None:
        """Train in each wire format."""
        from hvd_ckpt.bench.harness.jobs import JobError, run_job
        from hvd_ckpt.bench.shard.wire import FORMATS, STAGES, Runs, WireJob, wire_table
        from hvd_ckpt.runtime import threads_per_rank

        job = WireJob(self.run.jobs / "wire", self.size, self.training, steps)
        report = Report("Wire formats", self.facts(), [])
        with self.run.progress(1) as progress:
            progress.start(f"{len(FORMATS) * len(STAGES)} runs")
            try:
                threads = threads_per_rank(self.size)
                runs = run_job(job, Runs, self.controller, self.timeout, threads=threads)[0].runs
                report.tables, report.results = [wire_table(runs)], runs
            except JobError as error:
                report.remarks.append(f"no result: {error}")
        self.run.finish(report, bool(report.tables))
