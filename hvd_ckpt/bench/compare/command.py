"""``hvd-ckpt compare``: options, progress, table, exit status.

Exit status 0 if the judged engine (this library) is right in every cell, 1 if it is not, 2 for a bad argument or where
nothing can be compared.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    check_devices,
    device_option,
    whole_numbers,
)
from hvd_ckpt.utils.extras import explain_import_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from hvd_ckpt.bench.compare.comparison import Comparison
    from hvd_ckpt.bench.compare.launch import Event
    from hvd_ckpt.bench.harness.report import Report

ENGINES = "hvd_ckpt,horovod,horovod-groups,ddp,ddp-find-unused,ddp-static,apex"
WORKLOADS = "densenet,bert"
SCENARIOS = (
    "plain,tied,nested,unused,unused-on-one-rank,accumulation,short-last-group,frozen,changing-graph,two-forwards,no-grad-forward,"
    "explicit-parameters,mixed-dtypes,overflow-on-one-rank,uneven-data,sparse"
)
VARIANTS = "none,reentrant,non-reentrant,explicit"
PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")
SUBJECT = "hvd_ckpt"
STAGES_SECONDS = 20.0
WIDTH = 150  # of the table where the output is not a terminal
NOTHING = "nothing"  # in place of a list of workloads or scenarios


@dataclass(frozen=True)
class Preset:
    """The options that a scale sets where they are not given."""

    steps: int
    passes: int
    chunks: str
    timeout: float


PRESETS = {
    "quick": Preset(steps=4, passes=1, chunks="2", timeout=60),
    "default": Preset(steps=4, passes=1, chunks="1,2,4", timeout=90),
    "full": Preset(steps=5, passes=2, chunks="1,2,4", timeout=900),
}


@bench_command("compare", width=WIDTH, group="")
@click.option("--np", "size", type=click.IntRange(1), envvar="NP", default=2, help="Ranks (NP, else 2).")
@click.option(
    "--controller",
    type=click.Choice(["auto", "gloo", "mpi"]),
    default="auto",
    help="What the ranks communicate through.",
)
@click.option("--engines", default=ENGINES, show_default=True, help="Engines, or module:Class of your own.")
@click.option("--workloads", default=WORKLOADS, show_default=True, help="Models on real data, or 'nothing'.")
@click.option("--scenarios", default=SCENARIOS, show_default=True, help="Small hard models, or 'nothing'.")
@click.option("--variants", default=VARIANTS, show_default=True, help="Ways to recompute.")
@click.option("--chunks", help="Numbers of segments.  [default: 1,2,4; with --quick 2]")
@click.option(
    "--budget",
    help="Plan what is recomputed, too: 6GiB, 0.5x of keeping everything, 80% of the device, min or fastest.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Steps of each training run.  [default: 4; with --full 5]",
)
@click.option(
    "--passes",
    type=click.IntRange(0),
    help="Timed jobs per engine, alternating.  [default: 1; with --full 2]",
)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Of the training."
)
@device_option
@click.option(
    "--stages",
    type=click.IntRange(2, 8),
    help="Instead, small hard models in so many pipeline stages, beside torch.distributed.pipelining.",
)
@click.option("--quick", is_flag=True, help="Tiny models, two segments, one timed pass.")
@click.option("--full", is_flag=True, help="DenseNet-264 and BERT-base instead of small ones.")
@click.option("--text", metavar="FILE", help="Text to learn instead of Python's own source.")
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of weights, batches and dropout."
)
@click.option("--timeout", type=click.FloatRange(1), help="Seconds without a step that count as a hang.")
@click.option(
    "--subject", default=SUBJECT, show_default=True, help="The engine that must be right for exit status 0."
)
def compare(
    run: BenchRun,
    size: int,
    controller: str,
    engines: str,
    workloads: str,
    scenarios: str,
    variants: str,
    chunks: str | None,
    budget: str | None,
    steps: int | None,
    passes: int | None,
    precision: str,
    device: str,
    stages: int | None,
    quick: bool,
    full: bool,
    text: str | None,
    seed: int,
    timeout: float | None,
    subject: str,
) -> None:
    """Train real workloads and small hard ones with each engine and each way to recompute, and compare with one process.

    Reports for each: are all ranks' weights equal, do they equal the reference, do runs repeat bit for bit, how often and in
    which order gradients are reduced, the time of a step, and the peak memory. The exit status is 0 only if this library
    is right everywhere.
    """
    from hvd_ckpt.app.datasets.tokens import find_text_files
    from hvd_ckpt.bench.compare.catalog import CATALOG, IN_STAGES
    from hvd_ckpt.bench.compare.cells import PLAN, Settings, make_cells
    from hvd_ckpt.bench.compare.comparison import Comparison
    from hvd_ckpt.bench.compare.report import make_report, make_stage_report
    from hvd_ckpt.bench.compare.stage_engines import STAGE_ENGINES
    from hvd_ckpt.bench.compare.stages import STAGED
    from hvd_ckpt.bench.harness.engines import find_engine
    from hvd_ckpt.processes.runtime import threads_per_rank

    if quick and full:
        raise BadArgument("--quick and --full exclude each other: give one")
    scale = "quick" if quick else "full" if full else "default"
    preset = PRESETS[scale]
    if stages is not None:
        if device != "cpu":
            raise BadArgument(f"--device {device}: --stages compares on CPUs: leave it out")
        names = tuple(STAGED) if scenarios == SCENARIOS else split_names("--scenarios", scenarios, STAGED)
        engines = [f"{engine.__module__}:{engine.__name__}" for engine in STAGE_ENGINES.values()]
        _run(
            run,
            Comparison(
                engines=tuple(name for name in engines if find_engine(name).unavailable() is None),
                cells=tuple(make_cells({f"{IN_STAGES}{name}": STAGED[name].variants for name in names}, ())),
                subject=engines[0],
                size=stages,
                controller=check_controller(controller),
                threads=1,
                passes=0,
                settings=Settings(steps or preset.steps, seed),
                timeout=timeout or STAGES_SECONDS,
                folder=run.jobs,
            ),
            make_stage_report,
        )
        return
    chosen = split_names("--engines", engines, find=find_engine)
    if subject not in chosen:
        raise BadArgument(
            f"--subject {subject} is not among the engines {', '.join(chosen)}: add it, or judge another"
        )
    try:
        if text is not None:
            find_text_files(text)
            text = str(Path(text).resolve())
    except ValueError as error:
        raise BadArgument(f"--text: {error}") from None
    check_devices(device, size)
    _check_precision(precision)
    ways = split_names("--variants", variants, VARIANTS.split(","))
    if budget is not None:
        _check_budget(budget, chosen)
        ways = (*ways, f"{PLAN}{budget.strip()}")
    trained = [
        *split_names("--workloads", workloads, (*WORKLOADS.split(","), NOTHING)),
        *split_names("--scenarios", scenarios, (*SCENARIOS.split(","), NOTHING)),
    ]
    meaningful = {}
    for name in trained:
        if name != NOTHING:
            kind = CATALOG[name]
            _check_packages(name, kind.requires)
            if kind.precisions is None or precision in kind.precisions:
                meaningful[name] = tuple(
                    way for way in ways if way in kind.variants or (way.startswith(PLAN) and kind.plannable)
                )
    cells = make_cells(meaningful, whole_numbers("--chunks", chunks or preset.chunks, "segments"))
    if not cells:
        raise BadArgument(
            f"there is nothing to compare: --workloads {workloads} and --scenarios {scenarios} have no "
            f"--variants {variants} in --precision {precision}"
        )
    comparison = Comparison(
        engines=chosen,
        cells=tuple(cells),
        subject=subject,
        size=size,
        controller=check_controller(controller),
        threads=threads_per_rank(size),
        passes=preset.passes if passes is None else passes,
        settings=Settings(steps or preset.steps, seed, scale, text, precision, device),
        timeout=timeout or preset.timeout,
        folder=run.jobs,
    )
    _run(run, comparison, make_report)


def _run(run: BenchRun, comparison: Comparison, make: Callable[..., Report]) -> None:
    """Makes a comparison and its report, and ends the command."""
    from hvd_ckpt.bench.compare.comparison import ComparisonError

    try:
        with run.progress(comparison.trainings) as progress:

            def show(where: str, event: Event) -> None:
                if event["rank"] == 0:
                    cell = f": {event['cell']}" if "cell" in event else ""
                    progress.show(f"{where}{cell}", int(event["event"] in ("trained", "measured", "timed")))

            report = comparison.run(show, make)
    except ComparisonError as error:
        raise BadArgument(str(error)) from None
    run.finish(report, report.success)


def _check_budget(budget: str, engines: tuple[str, ...]) -> None:
    from hvd_ckpt.bench.harness.engines import find_engine
    from hvd_ckpt.planning.budget import parse_budget

    try:
        parse_budget(budget)
    except ValueError as error:
        raise BadArgument(f"--budget: {error}") from None
    if not any(find_engine(engine).plans for engine in engines):
        raise BadArgument(
            f"--budget {budget}: none of the engines {', '.join(engines)} has plans: add {SUBJECT} to --engines"
        )


def _check_packages(workload: str, packages: tuple[str, ...]) -> None:
    """Bad argument where a package is missing that a workload needs."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            text = explain_import_error(ModuleNotFoundError(name=package))
            raise BadArgument(f"{workload}: {text or f'{package} is not installed'}")


def _check_precision(precision: str) -> None:
    """Refuse what this machine cannot do."""
    from hvd_ckpt.distributed.precision import apex_unavailable

    if precision.startswith("apex"):
        reason = apex_unavailable()
        if reason is not None:
            raise BadArgument(f"--precision {precision}: {reason}; --precision fp16 needs no Apex")
