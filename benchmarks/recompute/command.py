"""``python -m benchmarks recompute``.

Exit status 0 if no recomputation and all of this library's plans ran with the same results, 1 if not, 2 for a bad argument.
A peer that does not run is a row of its own, with the reason below the table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_device
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    controller_setting,
    names_of,
    numbers_of,
    quick_setting,
    ranks_setting,
    setting,
    timeout_setting,
)

if TYPE_CHECKING:
    from benchmarks.recompute.case import Case, RecomputeJob

WORKLOADS = "gpt,bert,densenet,lstm"
METHODS = "keep,sequential,blocks,layers,selective,torch_remat,ours"
SHARE = 0.8  # of the free memory that a step may take


@dataclass(frozen=True)
class Settings(BenchSettings):
    """What is measured, and how often."""

    workloads: tuple[str, ...] = setting(
        "What is trained.", WORKLOADS, type=names_of(find="hvd_ckpt.app.compare.runner.workloads:workload")
    )
    methods: tuple[str, ...] = setting(
        "Beside no recomputation. 'compile' is torch.compile with its activation memory budgets, about a minute to compile each.",
        METHODS,
        type=names_of((*METHODS.split(","), "compile")),
    )
    budgets: tuple[str, ...] = setting(
        "Of our plans, as hvd_ckpt.plan takes them, or 'fastest'.",
        "0.7x,0.5x,0.3x,0.15x,min",
        type=names_of(),
    )
    rounds: int = setting("Timed steps of each, in turn.", 15, quick=3)
    sizes: tuple[int, ...] = ranks_setting("Numbers of ranks that train together.", "1", quick=None)
    batches: tuple[int, ...] | None = setting(
        "Samples of a step, over all ranks.", note="by workload, on each rank", type=numbers_of("samples")
    )
    precision: str = setting(
        "bf16: forward pass and loss under autocast to bfloat16.", "fp32", type=click.Choice(["fp32", "bf16"])
    )
    device: str = setting("cpu, cuda, or cuda:N.", "cpu")
    quick: bool = quick_setting("Tiny models and few rounds: whether it works, not how fast it is.")
    controller: str = controller_setting()
    timeout: float = timeout_setting()

    def check(self) -> None:
        device = check_device(self.device)
        for size, count in itertools.product(self.sizes, self.batches or ()):
            if count % size:
                raise BadArgument(
                    f"--batches: {count} samples cannot be shared by {size} ranks: give a multiple"
                )
        if max(self.sizes) > 1 and device.type != "cpu":
            raise BadArgument(
                f"--np: {max(self.sizes)} ranks train on the CPU only, give --np 1 for {self.device}"
            )


@bench_command(Settings, width=150)
def recompute(run: BenchRun, settings: Settings) -> None:
    """Time a step and measure its peak memory with this library's plans and with everything else that recomputes.

    Prints for each method its peak and its time, and the same for the plan whose budget is that peak. All methods run
    in one process per rank, step by step in turn. Run it on a machine that does nothing else.
    """
    import torch

    from benchmarks.recompute.case import Case, RecomputeJob, merged, run_case
    from benchmarks.recompute.report import make_report

    device = torch.device(settings.device)
    scale = "quick" if settings.quick else device.type
    cases: list[Case] = []
    run.make_report = lambda: make_report(run, cases, device, scale)
    jobs = list(itertools.product(settings.workloads, settings.sizes, settings.batches or (None,)))
    with run.progress(len(jobs)) as progress:
        for name, size, count in jobs:
            what = name if size == 1 else f"{name}, {size} ranks"
            batch = None if count is None else count // size
            job = RecomputeJob(
                run.jobs / f"{name}-np{size}-{count}", size, name, scale, batch,
                settings.methods, settings.budgets, settings.rounds,
                autocast="bfloat16" if settings.precision == "bf16" else None,
            )  # fmt: skip
            case = Case.of(job)
            if batch is not None and device.type == "cpu":
                case.left_out = _too_large(job)
            if case.left_out is not None:
                progress.start(f"{what}: {case.left_out}")
            elif size > 1:
                ranks = progress.job(what, job, Case, name=job.folder.name)
                case = merged(ranks) if ranks else case
                case.failure = run.failures.get(job.folder.name, case.failure)
            else:
                progress.start(what)
                case = run_case(job, device, lambda part: progress.show(f"{what}: {part}"))  # noqa: B023  # called at once
            cases.append(case)
            run.save(run.make_report())
    run.finish(success=all(case.sound for case in cases))


def _too_large(job: RecomputeJob) -> str | None:
    """Why a step without recomputation does not fit into the free memory; None if it does."""
    import psutil

    from benchmarks.recompute.measure import predicted_peak
    from hvd_ckpt.utils.text import show_bytes

    needed, room = predicted_peak(job.workload), int(SHARE * psutil.virtual_memory().available / job.size)
    if needed <= room:
        return None
    return f"left out: a step needs {show_bytes(needed)} on each rank, and {show_bytes(room)} are free for it"
