"""``hvd-ckpt bench tensor``: the command and its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hvd_ckpt.bench.harness.jobs import JobError, run_job
from hvd_ckpt.bench.harness.options import BenchRun, bench_command, count_option, quick_option, timeout_option
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts
from hvd_ckpt.bench.harness.stats import quartiles, quartiles_of_ratios, slowest

if TYPE_CHECKING:
    from hvd_ckpt.bench.tensor.job import RankResult

SIZES = {"vocabulary": 4096, "length": 128, "width": 256, "heads": 8, "layers": 4}
BATCH = 4
NOTES = (
    "A step is forward and backward pass and SGD, of the same GPT, in turn; of each round counts the slower rank.",
    "sums: the share of a step that waits for sums and gathers among the parts.",
    "PyTorch: parallelize_module with ColwiseParallel and RowwiseParallel, over Gloo.",
)


@bench_command("tensor", width=100)
@click.option("--np", "parts", type=click.IntRange(2), default=2, show_default=True, help="Parts of a layer.")
@count_option("--rounds", help="Rounds, in each of which both take steps.", default=9, quick=3)
@count_option("--steps", help="Steps of a round.", default=3, quick=1)
@quick_option("Three rounds of one step.")
@timeout_option(900)
def tensor(run: BenchRun, parts: int, rounds: int, steps: int, quick: bool, timeout: float) -> None:
    """Time steps of a GPT whose layers are split over parts, beside PyTorch's parallelize_module."""
    from hvd_ckpt.bench.tensor.job import Job, RankResult

    settings = {**SIZES, "batch": BATCH, "rounds": rounds, "steps": steps, "np": parts}
    results: list[RankResult] = []
    failures: list[str] = []
    with run.progress(1) as progress:
        progress.start(f"{parts} parts")
        try:
            job = Job(run.jobs / "steps", parts, SIZES, BATCH, rounds, steps)
            results = run_job(job, RankResult, "gloo", timeout, threads=1)
        except JobError as error:
            failures.append(str(error))
    run.finish(_report(results, failures, settings), success=not failures)


def _report(results: list[RankResult], failures: list[str], settings: dict[str, int]) -> Report:
    rows: list[tuple[str, ...]] = []
    conclusion = "The job failed."
    if results:
        seconds = {name: slowest(one.seconds[name] for one in results) for name in results[0].seconds}
        ours, theirs = seconds
        ratio = quartiles_of_ratios(seconds[ours], seconds[theirs])
        share = quartiles(results[0].sums).median / quartiles(seconds[ours]).median
        for name, values in seconds.items():
            of_sums = f"{share:.0%}" if name == ours else ""
            rows.append((name, f"{quartiles([1e3 * one for one in values]):.1f}", of_sums))
        conclusion = f"A step takes {ratio:.2f} times that of {theirs}."
    return Report(
        "Tensor parallelism: time of a step",
        machine_facts(1, settings),
        [Table(("engine", "ms a step", "sums"), rows, left=("engine",))],
        results,
        remarks=failures,
        notes=NOTES,
        settings=settings,
        conclusion=conclusion,
        success=not failures,
    )
