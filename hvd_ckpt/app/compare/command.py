"""``hvd-ckpt compare``: options, progress, table, exit status.

Exit status 0 if the judged engine (this library) is right in every cell, 1 if it is not, 2 for a bad argument or where
nothing can be compared.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hvd_ckpt.app.compare.runner.jobs import Event
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    OF_DEVICE,
    BenchSettings,
    Controller,
    Device,
    Seconds,
    TextFile,
    names_of,
    numbers_of,
)
from hvd_ckpt.app.training.field_types import Count, one_of

VARIANTS = ("none", "reentrant", "non-reentrant", "explicit")
FIND = "hvd_ckpt.app.compare.runner.engines:find_engine"
PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")
Natural = Annotated[int, Field(ge=0)]


class CompareSettings(BenchSettings):
    """The options, as they are given."""

    np: Count = Field(2, description="Ranks; NP is the default.", json_schema_extra={"envvar": "NP"})
    controller: Controller = Field("auto", description="Controller that starts the ranks: auto, gloo, mpi.")
    engines: Annotated[tuple[str, ...] | None, names_of(find=FIND)] = Field(
        None,
        description="Engines, or module:Class of your own.  [default: this library, Horovod, DDP and Apex]",
    )
    workloads: str | None = Field(None, description="Models on real data, or 'nothing'.  [default: all]")
    scenarios: str | None = Field(None, description="Small hard models, or 'nothing'.  [default: all]")
    variants: Annotated[tuple[str, ...], names_of(VARIANTS)] = Field(
        VARIANTS, description="Ways to recompute."
    )
    chunks: Annotated[tuple[int, ...] | None, numbers_of("segments")] = Field(
        None, description="Numbers of segments.  [default: 1,2,4; with --quick 2]"
    )
    steps: Count = Field(4, description="Steps of each training run.")
    passes: Natural = Field(1, description="Timed jobs per engine, alternating.")
    precision: Annotated[str, one_of("precision", *PRECISIONS)] = Field(
        "fp32", description=f"Of the training: {', '.join(PRECISIONS)}."
    )
    device: Device = Field("cpu", description=OF_DEVICE)
    quick: bool = Field(False, description="Tiny models, two segments, one timed pass.")
    text: TextFile | None = Field(
        None, description="Training text.  [default: the source text of Python's library]"
    )
    seed: Natural = Field(1, description="Of weights, batches and dropout.")
    timeout: Seconds = Field(90.0, description="Seconds without a step that count as a hang.")
    subject: str | None = Field(
        None, description="The engine that must be right for exit status 0.  [default: hvd_ckpt]"
    )


HELP = """Train real workloads and small hard ones with each engine and each way to recompute, and compare with one process.

Reports for each: are all ranks' weights equal, do they equal the reference, do runs repeat bit for bit, how often and in which
order gradients are reduced, the time of a step, and the peak memory. The exit status is 0 only if this library is right everywhere.
"""


def run_comparison(run: BenchRun, settings: CompareSettings) -> None:
    """The command; :data:`HELP` says what it does."""
    from hvd_ckpt.app.compare.comparison import Comparison  # which imports PyTorch

    comparison = Comparison(settings, run)
    with run.progress(comparison.trainings) as progress:

        def show(where: str, event: Event) -> None:
            if event["rank"] == 0:
                cell = f": {event['cell']}" if "cell" in event else ""
                progress(f"{where}{cell}", int(event["event"] == "result"))

        report = comparison.run(show)
    run.finish(report)


compare = bench_command("compare", HELP, CompareSettings, run_comparison)
