"""``hvd-ckpt bench recompute``.

Exit status 0 if no recomputation and all of this library's plans ran with the same results, 1 if not, 2 for a bad argument.
A peer that does not run is a row of its own, with the reason below the table.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, check_device, split_names
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    count_option,
    job_options,
    quick_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import machine_facts

if TYPE_CHECKING:
    import torch

    from hvd_ckpt.bench.recompute.case import Case, RecomputeJob

WORKLOADS = "gpt,bert,densenet,lstm"
METHODS = "keep,sequential,blocks,layers,selective,torch_remat,ckptplan,rockmate,ours"
BUDGETS = "0.7x,0.5x,0.3x,0.15x,min"
ROUNDS, QUICK_ROUNDS = 15, 3
SHARE = 0.8  # of the free memory that a step may take


@bench_command("recompute", width=150)
@click.option("--workloads", default=WORKLOADS, show_default=True, help="What is trained.")
@click.option(
    "--methods",
    default=METHODS,
    show_default=True,
    help="Beside no recomputation. 'compile' is torch.compile with its activation memory budgets, about a minute to compile each.",
)
@click.option(
    "--budgets",
    default=BUDGETS,
    show_default=True,
    help="Of our plans, as hvd_ckpt.plan takes them, or 'fastest'.",
)
@count_option("--rounds", help="Timed steps of each, in turn.", default=ROUNDS, quick=QUICK_ROUNDS)
@click.option("--np", "ranks", default="1", show_default=True, help="Numbers of ranks that train together.")
@click.option("--batches", help="Samples of a step, over all ranks.  [default: by workload, on each rank]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16: forward pass and loss under autocast to bfloat16.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N.")
@quick_option("Tiny models and few rounds: whether it works, not how fast it is.")
@job_options
def recompute(
    run: BenchRun,
    workloads: str,
    methods: str,
    budgets: str,
    rounds: int,
    ranks: str,
    batches: str | None,
    precision: str,
    device: str,
    quick: bool,
    controller: str,
    timeout: float,
) -> None:
    """Time a step and measure its peak memory with this library's plans and with everything else that recomputes.

    Prints for each method its peak and its time, and the same for the plan whose budget is that peak. All methods run
    in one process per rank, step by step in turn. Run it on a machine that does nothing else.
    """
    import torch

    from hvd_ckpt.bench.harness.jobs import JobError, run_job
    from hvd_ckpt.bench.harness.workloads import WORKLOADS as KNOWN
    from hvd_ckpt.bench.recompute.case import Case, RecomputeJob, merged, run_case
    from hvd_ckpt.bench.recompute.methods import FAMILIES
    from hvd_ckpt.bench.recompute.report import make_report

    names = split_names("--workloads", workloads, KNOWN)
    families = split_names("--methods", methods, FAMILIES)
    wishes = split_names("--budgets", budgets)
    sizes = whole_numbers("--np", ranks, "ranks")
    counts = (None,) if batches is None else whole_numbers("--batches", batches, "samples")
    place = check_device(device)
    for size in sizes:
        for count in counts:
            if count is not None and count % size:
                raise BadArgument(
                    f"--batches: {count} samples cannot be shared by {size} ranks: give a multiple"
                )
        if size > 1 and place.type != "cpu":
            raise BadArgument(f"--np: {size} ranks train on the CPU only, give --np 1 for {device}")
    carrier = check_controller(controller) if max(sizes) > 1 else ""
    scale = "quick" if quick else place.type
    cases: list[Case] = []

    facts = {
        **machine_facts(),
        "device": _describe(place),
        "threads": str(torch.get_num_threads()),
        "rounds": str(rounds),
    }
    settings = {
        "workloads": names,
        "methods": families,
        "budgets": wishes,
        "np": sizes,
        "sizes": scale,
        "precision": precision,
    }
    plan = list(itertools.product(names, sizes, counts))
    with run.progress(len(plan)) as progress:
        for name, size, count in plan:
            what = name if size == 1 else f"{name}, {size} ranks"
            progress.start(what)
            batch = None if count is None else count // size
            folder = run.jobs / f"{name}-np{size}-{count}"
            job = RecomputeJob(
                folder, size, name, scale, batch, families, wishes, rounds,
                autocast="bfloat16" if precision == "bf16" else None,
            )  # fmt: skip
            case = Case.of(job)
            if batch is not None and place.type == "cpu":
                case.left_out = _too_large(job)
            if case.left_out is not None:
                progress.show(f"{what}: {case.left_out}")
            elif size > 1:
                try:
                    case = merged(run_job(job, Case, carrier, timeout))
                except JobError as error:
                    case.failure = str(error)
            else:
                case = run_case(job, place, lambda part: progress.show(f"{what}: {part}"))  # noqa: B023  # called at once
            cases.append(case)
            run.save(make_report(cases, facts, settings))  # a long run that is ended leaves what it has found
    run.finish(make_report(cases, facts, settings), all(case.sound for case in cases))


def _too_large(job: RecomputeJob) -> str | None:
    """Why a step without recomputation does not fit into the free memory; None if it does."""
    import psutil

    from hvd_ckpt.bench.recompute.measure import predicted_peak
    from hvd_ckpt.utils.text import show_bytes

    needed, room = predicted_peak(job.workload), int(SHARE * psutil.virtual_memory().available / job.size)
    if needed <= room:
        return None
    return f"left out: a step needs {show_bytes(needed)} on each rank, and {show_bytes(room)} are free for it"


def _describe(device: torch.device) -> str:
    import torch

    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
