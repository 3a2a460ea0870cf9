"""``hvd-ckpt plan``: make or load a plan, measure it, and write tables, the plan and its pictures.

Exit status 0 if the plan stays within its budget when measured, 1 if it does not, 2 for a bad argument, a budget that
cannot be met, or a plan file that cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.cli.plan_cluster import Cluster, cluster_of, cluster_options
from hvd_ckpt.command_line import (
    BadArgument,
    OneLineErrors,
    check_device,
    console_for_tables,
    output_folder,
    progress_bar,
)
from hvd_ckpt.install.extras import explain_import_error, say_no_pictures
from hvd_ckpt.models import catalog
from hvd_ckpt.planning.budget import BudgetError, parse_budget
from hvd_ckpt.text import show_bytes
from hvd_ckpt.values import named

if TYPE_CHECKING:
    import torch

    from hvd_ckpt.cli.plan_models import Job
    from hvd_ckpt.planning.plan import Cost, Plan
    from hvd_ckpt.planning.profile import Step


ROUNDS = 5  # of timing
WIDTH = 120  # of the tables where the output is not a terminal

HELP = f"""Decide what a model's forward pass keeps so that a training step fits a memory budget, and measure it.

Models: {catalog.overview()}; or a folder of a Hugging Face model; or module:function, a function of your own that returns
the model, a tuple of its sample arguments, and its loss (a function of its output) or None. It gets those of the sizes and options
below that you give.
"""


@click.command("plan", cls=OneLineErrors, help=HELP)
@click.option(
    "--model", "name", required=True, metavar="NAME", help="A name, a folder, or module:function, see above."
)
@click.option(
    "--model-option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the model, such as layers=2; may be given several times.",
)
@click.option("--batch", type=click.IntRange(1), help="Samples in the batch.  [default: 8; 2 volumes]")
@click.option("--length", type=click.IntRange(2), help="Tokens of a sequence.  [default: by model]")
@click.option(
    "--vocabulary", type=click.IntRange(2), help="Different tokens.  [default: bytes and special tokens]"
)
@click.option("--pixels", type=click.IntRange(1), help="Of an image's or volume's side.  [default: by model]")
@click.option("--channels", type=click.IntRange(1), help="Of an image or volume.  [default: 1]")
@click.option("--classes", type=click.IntRange(2), help="Of images or voxels.  [default: as train's data]")
@click.option(
    "--budget",
    help="Peak of a step: 6GiB, 0.3x (of no recomputation), 80% (of the device), min, fastest.  [default: fastest]",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="bf16, fp16: under autocast.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N.")
@click.option("--load", "file", metavar="FILE", help="Measure the plan in this file instead of making one.")
@cluster_options
@click.option("--output", metavar="FOLDER", help="For plan and pictures.  [default: runs/plan-<time>]")
def plan(
    name: str,
    options: tuple[str, ...],
    budget: str | None,
    precision: str,
    device: str,
    file: str | None,
    output: str | None,
    **others: Any,
) -> None:
    """The command; :data:`HELP` says what it does."""
    try:
        parse_budget(budget)
        model_options = named("--model-option", options)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    place = check_device(device)
    cluster = cluster_of(others)
    loaded = _load(file) if file is not None else None
    job = _job(
        name, {size: value for size, value in others.items() if value is not None}, model_options, place
    )
    if loaded is not None:
        loaded = _fitting(loaded, job, budget, place)
    folder = output_folder(output, "plan")
    chosen, baseline, unmet = _planned(job, loaded, budget, precision)
    _report(chosen, baseline, folder, job, cluster, precision)
    assert chosen.measured is not None
    if unmet is not None:
        nearest = unmet.smallest
        share = nearest / chosen.baseline.peak_bytes
        click.echo(
            f"Nearest budget: {nearest} ({show_bytes(nearest)}, {share:.2f}x), for which this plan is."
        )
        raise BadArgument(f"--budget {budget}: {unmet}")
    if chosen.budget is not None and chosen.measured.peak_bytes > chosen.budget:
        over = chosen.measured.peak_bytes - chosen.budget
        click.echo(f"The plan's measured peak is {over} bytes over its budget of {chosen.budget}.", err=True)
        sys.exit(1)


def _load(file: str) -> Plan:
    from hvd_ckpt.planning.plan import Plan, PlanError

    try:
        return Plan.load(file)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    except OSError as error:
        raise BadArgument(f"--load: cannot read '{file}': {error.strerror}") from None


def _job(name: str, sizes: dict[str, int], options: dict[str, Any], device: torch.device) -> Job:
    from hvd_ckpt.cli.plan_models import build

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(
            0, str(Path.cwd())
        )  # as `python -m` has it: module:function is most often in this folder
    try:
        return build(name, sizes, options, device)
    except ValueError as error:
        raise BadArgument(f"--model: {error}") from None
    except ModuleNotFoundError as error:
        raise BadArgument(f"--model {name}: {explain_import_error(error) or error}") from None


def _fitting(loaded: Plan, job: Job, budget: str | None, device: torch.device) -> Plan:
    """The loaded plan, with the budget asked for, if it fits the model."""
    from hvd_ckpt.planning.plan import PlanError, sample_shapes

    try:
        loaded.check(job.model)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    sample = sample_shapes(job.sample, job.kwargs)
    if sample != loaded.sample:
        made, given = (
            ", ".join(f"{dtype}{list(shape)}" for dtype, shape in one) for one in (loaded.sample, sample)
        )
        click.echo(f"The plan was made for {made}, the batch is {given}: predictions do not hold.", err=True)
    if budget is None:
        return loaded
    limit = parse_budget(budget).bytes(loaded.baseline.peak_bytes, loaded.smallest.peak_bytes, device)
    return dataclasses.replace(loaded, budget=limit)


def _planned(
    job: Job, loaded: Plan | None, budget: str | None, precision: str
) -> tuple[Plan, Cost | None, BudgetError | None]:
    """The plan with its measured cost, that without recomputation (where it fits), and the error if it is only the nearest plan."""
    import torch

    from hvd_ckpt.planning.profile import Step

    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    unmet = None
    with progress_bar(each=True) as progress:
        task = progress.add_task("planning", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)

        if loaded is None:
            chosen, unmet = _made(job, budget, autocast, say)
        else:
            chosen = loaded
        chosen, baseline = _measured(chosen, Step(job.model, job.sample, job.kwargs, job.loss, autocast), say)
    return chosen, baseline, unmet


def _made(
    job: Job, budget: str | None, autocast: torch.dtype | None, say: Callable[[str], None]
) -> tuple[Plan, BudgetError | None]:
    """The plan, or the one that comes nearest, with the error that says so."""
    from hvd_ckpt.planning.planner import Planner

    arguments: dict[str, Any] = {"kwargs": job.kwargs, "loss": job.loss, "autocast": autocast}
    try:
        return Planner(job.model, *job.sample, **arguments, say=say, budget=budget).plan(budget), None
    except BudgetError as error:
        if error.nearest is not None:
            return error.nearest, error
        raise BadArgument(f"--budget {budget}: {error}") from None
    except ValueError as error:
        raise BadArgument(str(error)) from None


def _measured(chosen: Plan, step: Step, say: Callable[[str], None]) -> tuple[Plan, Cost | None]:
    """The plan with cost and timelines measured anew, and the cost without recomputation, if that was seen to fit; in turns."""
    from hvd_ckpt.measure import undisturbed
    from hvd_ckpt.planning.plan import Cost, applied
    from hvd_ckpt.planning.planner import thinned

    forms: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
    forms["after"] = lambda: applied(step.model, chosen)
    if "before" in chosen.timelines:
        forms["before"] = contextlib.nullcontext
    peaks, timelines = {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    with undisturbed(step.model, step.device):
        for name, form in forms.items():
            say(f"measuring the memory {name} planning")
            with form():
                step.run()
                peaks[name], timeline = step.peak()
                timelines[name] = thinned(timeline)
        for number in range(ROUNDS):
            say(f"timing, round {number + 1} of {ROUNDS}")
            for name in forms if number % 2 == 0 else reversed(forms):
                with forms[name]():
                    seconds[name].append(step.seconds())
    costs = {name: Cost(peaks[name], statistics.median(seconds[name])) for name in forms}
    chosen = dataclasses.replace(chosen, measured=costs["after"], timelines=timelines)
    return chosen, costs.get("before")


def _report(
    chosen: Plan, baseline: Cost | None, folder: Path, job: Job, cluster: Cluster | None, precision: str
) -> None:
    """Prints the tables and writes the files."""
    from hvd_ckpt.planning.show import print_plan

    console = console_for_tables(WIDTH)
    print_plan(chosen, console, baseline)
    if cluster is not None:
        cluster.show(job, chosen, precision, console)
    chosen.save(folder / "plan.json")
    click.echo(f"Plan: {folder / 'plan.json'}")
    try:
        from hvd_ckpt.planning.pictures import frontier_plot, timeline_plot
    except ImportError as error:
        say_no_pictures(error)
        return
    frontier_plot(chosen, folder / "frontier.png", baseline)
    click.echo(f"Frontier: {folder / 'frontier.png'}")
    if any(chosen.timelines.values()):
        timeline_plot(chosen, folder / "timeline.png", baseline)
        click.echo(f"Timeline: {folder / 'timeline.png'}")
