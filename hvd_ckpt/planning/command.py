"""``hvd-ckpt plan``: options, progress, tables, files, exit status.

Exit status 0 if the plan stays within its budget when measured, 1 if it does not, 2 for a bad argument, a budget that
cannot be met, or a plan file that cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from hvd_ckpt.command_line import BadArgument, OneLineErrors, check_device, console_for_tables, output_folder
from hvd_ckpt.models import catalog
from hvd_ckpt.planning.budget import BudgetError, parse_budget
from hvd_ckpt.planning.cluster import cluster_of, cluster_options
from hvd_ckpt.planning.models import Job, build
from hvd_ckpt.planning.peers import Form, Measured, Timeline, measure, peers_of
from hvd_ckpt.planning.plan import Plan, PlanError, applied
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.planning.show import print_plan
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.values import named

__all__ = ["plan"]

FASTEST = "fastest"
KEEP, CHOSEN = "keep everything", "this plan"
LABELS = {"before": KEEP, "after": CHOSEN}  # of a plan's timelines
ROUNDS = 5
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
    default=None,
    help=f"Peak of a step: 6GiB, 0.3x (of keep everything), 80% (of the device), min, {FASTEST}.  [default: {FASTEST}]",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16: under autocast.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N.")
@click.option(
    "--load",
    "file",
    metavar="FILE",
    default=None,
    help="Measure the plan in this file instead of making one.",
)
@click.option(
    "--peers", is_flag=True, help="Also measure what PyTorch's own checkpointing takes, for the picture."
)
@cluster_options
@click.option(
    "--output", metavar="FOLDER", default=None, help="For plan and pictures.  [default: runs/plan-<time>]"
)
def plan(
    name: str,
    options: tuple[str, ...],
    budget: str | None,
    precision: str,
    device: str,
    file: str | None,
    peers: bool,
    output: str | None,
    **others: Any,
) -> None:
    """The command; :data:`HELP` says what it does."""
    place = check_device(device)
    cluster = cluster_of(others)
    _check_budget(budget)
    loaded = _load(file) if file is not None else None
    given = {size: value for size, value in others.items() if value is not None}
    job = _job(name, given, _named(options), place)
    if loaded is not None:
        loaded = _fitting(loaded, job, budget, place)
    folder = output_folder(output, "plan")
    with Console(stderr=True).status("planning") as status:

        def say(what: str) -> None:
            status.update(what)

        autocast = torch.bfloat16 if precision == "bf16" else None
        chosen = loaded if loaded is not None else _made(job, budget, autocast, say)
        step = Step(job.model, job.sample, job.kwargs, job.loss, autocast)
        chosen, found, failures = _measured(chosen, step, peers, loaded is not None, say)
    print_plan(chosen, console_for_tables(WIDTH), found[KEEP].cost if KEEP in found else None)
    if cluster is not None:
        cluster.show(job, chosen, precision, console_for_tables(WIDTH))
    for peer, reason in failures.items():
        click.echo(f"{peer} does not run: {reason}", err=True)
    chosen.save(folder / "plan.json")
    click.echo(f"Plan: {folder / 'plan.json'}")
    _draw(chosen, found, folder)
    assert chosen.measured is not None
    if chosen.budget is not None and chosen.measured.peak_bytes > chosen.budget:
        over = chosen.measured.peak_bytes - chosen.budget
        click.echo(f"The plan's measured peak is {over} bytes over its budget of {chosen.budget}.", err=True)
        sys.exit(1)


def _check_budget(budget: str | None) -> None:
    try:
        parse_budget(budget)
    except ValueError as error:
        raise BadArgument(f"--budget: {error}") from None


def _load(file: str) -> Plan:
    try:
        return Plan.load(file)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    except OSError as error:
        raise BadArgument(f"--load: cannot read '{file}': {error.strerror}") from None


def _named(options: tuple[str, ...]) -> dict[str, Any]:
    try:
        return named("--model-option", options)
    except ValueError as error:
        raise BadArgument(str(error)) from None


def _job(name: str, sizes: dict[str, int], options: dict[str, Any], device: torch.device) -> Job:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(
            0, str(Path.cwd())
        )  # as `python -m` has it: module:function is most often in this folder
    try:
        return build(name, sizes, options, device)
    except ValueError as error:
        raise BadArgument(f"--model: {error}") from None
    except ModuleNotFoundError as error:
        raise BadArgument(
            f"--model {name}: {error.name} is not installed (pip install hvd_ckpt[training])"
        ) from None


def _fitting(loaded: Plan, job: Job, budget: str | None, device: torch.device) -> Plan:
    """The loaded plan, with the budget asked for, if it fits the model."""
    try:
        loaded.check(job.model)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    sample = tuple(
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for tensor in tensors_in(job.sample, job.kwargs)
    )
    if sample != loaded.sample:
        described = [
            ", ".join(f"{dtype}{list(shape)}" for dtype, shape in one) for one in (loaded.sample, sample)
        ]
        click.echo(
            f"The plan was made for {described[0]}, the batch is {described[1]}: predictions do not hold.",
            err=True,
        )
    if budget is None:
        return loaded
    limit = parse_budget(budget).bytes(loaded.keep_everything.peak_bytes, loaded.smallest.peak_bytes, device)
    return dataclasses.replace(loaded, budget=limit)


def _made(job: Job, budget: str | None, autocast: torch.dtype | None, say: Callable[[str], None]) -> Plan:
    try:
        planner = Planner(
            job.model, *job.sample, kwargs=job.kwargs, loss=job.loss, autocast=autocast, say=say
        )
        return planner.plan(budget)
    except BudgetError as error:
        raise BadArgument(f"--budget {budget}: {error}") from None
    except ValueError as error:
        raise BadArgument(str(error)) from None


def _measured(
    chosen: Plan, step: Step, with_peers: bool, renew: bool, say: Callable[[str], None]
) -> tuple[Plan, dict[str, Measured], dict[str, str]]:
    """The plan with its cost measured anew, and what all that were measured took, or why they did not run.

    ``renew``: its timelines are to be those of this measurement.
    """
    forms: dict[str, Form] = {CHOSEN: lambda model: applied(model, chosen)}
    if "before" in chosen.timelines:  # it was seen to fit
        forms[KEEP] = lambda model: contextlib.nullcontext()
    if with_peers:
        forms.update(peers_of(step.model, chosen))
    found, failures = measure(step, forms, ROUNDS, say)
    if CHOSEN in failures:
        raise click.ClickException(f"the plan does not run: {failures[CHOSEN]}")
    chosen = dataclasses.replace(chosen, measured=found[CHOSEN].cost)
    if renew:
        timelines = {label: _sparse(found[form].timeline) for label, form in LABELS.items() if form in found}
        chosen = dataclasses.replace(chosen, timelines=timelines)
    return chosen, found, failures


def _sparse(timeline: Timeline, points: int = 400) -> Timeline:
    """About so many points, the highest among them."""
    if len(timeline) <= points:
        return timeline
    return tuple(
        sorted({*timeline[:: -(-len(timeline) // points)], max(timeline, key=lambda point: point[1])})
    )


def _draw(chosen: Plan, found: dict[str, Measured], folder: Path) -> None:
    try:
        from hvd_ckpt.planning.draw import Curve, Peer, frontier_plot, timeline_plot
    except ImportError as error:
        click.echo(f"No pictures: {error}", err=True)
        return
    peers = [Peer(name, *one.cost) for name, one in found.items() if name not in (KEEP, CHOSEN)]
    kept = found.get(KEEP)
    frontier_plot(chosen, folder / "frontier.png", peers, kept.cost if kept else None)
    click.echo(f"Frontier: {folder / 'frontier.png'}")
    curves = {
        label: Curve(found[form].timeline, found[form].cost.seconds, found[form].forward_seconds)
        for label, form in LABELS.items()
        if form in found and found[form].timeline
    }
    if curves:
        timeline_plot(chosen, folder / "timeline.png", curves)
        click.echo(f"Timeline: {folder / 'timeline.png'}")
