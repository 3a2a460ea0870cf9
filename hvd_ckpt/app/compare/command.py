"""``hvd-ckpt compare``: options, progress, table, exit status.

Exit status 0 if the judged engine (this library) is right in every cell, 1 if it is not, 2 for a bad argument or where
nothing can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    controller_setting,
    device_setting,
    names_of,
    numbers_of,
    setting,
    text_setting,
)

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.launch import Event

VARIANTS = "none,reentrant,non-reentrant,explicit"
PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")


@dataclass(frozen=True)
class CompareSettings(BenchSettings):
    """The options, as they are given."""

    size: int = setting("Ranks.", 2, note="NP, else 2", flag="np", envvar="NP")
    controller: str = controller_setting()
    engines: tuple[str, ...] | None = setting(
        "Engines, or module:Class of your own.",
        note="this library, Horovod, DDP and Apex",
        type=names_of(find="hvd_ckpt.app.compare.runner.engines:find_engine"),
    )
    workloads: str | None = setting("Models on real data, or 'nothing'.", note="all")
    scenarios: str | None = setting("Small hard models, or 'nothing'.", note="all")
    variants: tuple[str, ...] = setting("Ways to recompute.", VARIANTS, type=names_of(VARIANTS.split(",")))
    chunks: tuple[int, ...] | None = setting(
        "Numbers of segments.",
        note="1,2,4; with --quick 2",
        type=numbers_of("segments"),
    )
    steps: int = setting("Steps of each training run.", 4)
    passes: int = setting("Timed jobs per engine, alternating.", 1, type=click.IntRange(0))
    precision: str = setting("Of the training.", "fp32", type=click.Choice(PRECISIONS))
    device: str = device_setting()
    quick: bool = setting("Tiny models, two segments, one timed pass.", False)
    full: bool = setting("DenseNet-264 and BERT-base instead of small ones.", False)
    text: str | None = text_setting()
    seed: int = setting("Of weights, batches and dropout.", 1, type=click.IntRange(0))
    timeout: float = setting("Seconds without a step that count as a hang.", 90.0, type=click.FloatRange(1))
    subject: str | None = setting("The engine that must be right for exit status 0.", note="hvd_ckpt")

    def check(self) -> None:
        if self.quick and self.full:
            raise BadArgument("--quick and --full exclude each other: give one")

    @property
    def scale(self) -> str:
        """The size of the models."""
        return "quick" if self.quick else "full" if self.full else "default"


@bench_command(CompareSettings, width=150, program="hvd-ckpt")
def compare(run: BenchRun, settings: CompareSettings) -> None:
    """Train real workloads and small hard ones with each engine and each way to recompute, and compare with one process.

    Reports for each: are all ranks' weights equal, do they equal the reference, do runs repeat bit for bit, how often and in
    which order gradients are reduced, the time of a step, and the peak memory. The exit status is 0 only if this library
    is right everywhere.
    """
    from hvd_ckpt.app.compare.comparison import Comparison  # which imports PyTorch

    comparison = Comparison(settings, run)
    with run.progress(comparison.trainings) as progress:

        def show(where: str, event: Event) -> None:
            if event["rank"] == 0:
                cell = f": {event['cell']}" if "cell" in event else ""
                progress.show(f"{where}{cell}", int(event["event"] == "result"))

        report = comparison.run(show)
    run.finish(report, report.success)
