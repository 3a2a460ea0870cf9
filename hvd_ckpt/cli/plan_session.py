"""One call of ``hvd-ckpt plan``: the model, a plan made or loaded, its measurement, tables, files, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from hvd_ckpt.cli.plan_cluster import cluster_of
from hvd_ckpt.cli.plan_models import Job, build
from hvd_ckpt.cli.plan_peers import Form, Measured, Timeline, measure, peers_of
from hvd_ckpt.command_line import BadArgument, check_device, console_for_tables, output_folder, progress_bar
from hvd_ckpt.install.extras import explain_import_error, say_no_pictures
from hvd_ckpt.planning.budget import BudgetError, parse_budget, show_bytes
from hvd_ckpt.planning.plan import Plan, PlanError, applied
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.planning.show import print_plan
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.values import named

__all__ = ["run"]

KEEP, CHOSEN = "keep everything", "this plan"
LABELS = {"before": KEEP, "after": CHOSEN}  # of a plan's timelines
ROUNDS = 5
WIDTH = 120  # of the tables where the output is not a terminal


def run(
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
    """Arguments as the options of ``hvd-ckpt plan``; ends the process if the plan is over its budget."""
    place = check_device(device)
    cluster = cluster_of(others)
    loaded = _load(file) if file is not None else None
    given = {size: value for size, value in others.items() if value is not None}
    job = _job(name, given, _named(options), place)
    if loaded is not None:
        loaded = _fitting(loaded, job, budget, place)
    folder = output_folder(output, "plan")
    with progress_bar(each=True) as progress:
        task = progress.add_task("planning", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)

        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        chosen, unmet = (loaded, None) if loaded is not None else _made(job, budget, autocast, say)
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
        raise BadArgument(f"--model {name}: {explain_import_error(error) or error}") from None


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
    limit = parse_budget(budget).bytes(loaded.baseline.peak_bytes, loaded.smallest.peak_bytes, device)
    return dataclasses.replace(loaded, budget=limit)


def _made(
    job: Job, budget: str | None, autocast: torch.dtype | None, say: Callable[[str], None]
) -> tuple[Plan, BudgetError | None]:
    """The plan, or the one that comes nearest, with the error that says so."""
    try:
        planner = Planner(
            job.model,
            *job.sample,
            kwargs=job.kwargs,
            loss=job.loss,
            autocast=autocast,
            say=say,
            budget=budget,
        )
        return planner.plan(budget), None
    except BudgetError as error:
        if error.nearest is not None:
            return error.nearest, error
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
        say_no_pictures(error)
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
