"""``hvd-ckpt plan``: make or load a plan, measure it, and write tables, the plan and its pictures.

The exit status is 0 if the plan stays within its budget when measured, and 1 if it does not. It is 2 for an invalid argument, a
budget that cannot be met, or a plan file that cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import (
    BadArgument,
    OneLineErrors,
    check_device,
    console_for_tables,
    output_folder,
    saying,
    take_options,
    takes_model,
)
from hvd_ckpt.app.models import catalog
from hvd_ckpt.parallel.pipeline.schedule import NAMES
from hvd_ckpt.planning.budget import Budget, BudgetError, parse_budget
from hvd_ckpt.utils import rules
from hvd_ckpt.utils.extras import say_no_pictures
from hvd_ckpt.utils.text import show_bytes

if TYPE_CHECKING:
    import torch

    from hvd_ckpt.app.cli.plan_models import PlannedModel
    from hvd_ckpt.parallel.pipeline.stages import StageLayout
    from hvd_ckpt.planning.plan import Cost, Plan
    from hvd_ckpt.planning.step import Step


ROUNDS = 5  # of timing
MOST_RANKS = 1 << 20
WIDTH = 120  # of the tables where the output is not a terminal

HELP = f"""Choose what a model's forward pass keeps so that a training step fits a memory budget, and measure the step.

Models: {catalog.overview()}; a folder of a Hugging Face model; or module:function. Such a function of your own returns
the model, a tuple of its sample arguments, and its loss (a function of its output) or None. It is called with the sizes and options
below that you give.
"""


@click.command("plan", cls=OneLineErrors, help=HELP)
@takes_model
@click.option("--batch", type=click.IntRange(1), help="Samples in the batch.  [default: 8, or 2 volumes]")
@click.option(
    "--budget",
    help="Peak of a step: 6GiB, 0.3x (of no recomputation), 80% (of the device), min, fastest.  [default: fastest]",
)
@click.option(
    "--chunk-head/--no-chunk-head",
    default=True,
    help="The head of a language model may be computed in chunks, which changes results by rounding.",
)
@click.option("--load", "file", metavar="FILE", help="Measure the plan in this file instead of making one.")
@click.option(
    "--stages",
    type=click.IntRange(1, MOST_RANKS),
    help="Plan for this many pipeline stages; the budget is then for one stage, and --batch is a micro-batch.",
)
@click.option(
    "--chunks",
    type=click.IntRange(1, MOST_RANKS),
    help="Micro-batches of a step.  [default: 2 for each stage]",
)
@click.option("--schedule", type=click.Choice(NAMES), help="Schedule of the stages.  [default: 1f1b]")
@click.option(
    "--param-scale",
    type=click.FloatRange(1.0),
    help="Bytes of parameter, gradient and optimizer state for each byte of a parameter.  [default: 4]",
)
@click.option(
    "--tensor",
    type=click.IntRange(1, MOST_RANKS),
    default=1,
    show_default=True,
    help="Split layers into this many parts; bytes are those of one part, and the time of messages is not counted.",
)
@click.option(
    "--output", metavar="FOLDER", help="Folder for the plan and the pictures.  [default: runs/plan-<time>]"
)
def plan(
    name: str | None,
    options: tuple[str, ...],
    device: str,
    file: str | None,
    output: str | None,
    tensor: int,
    **others: Any,
) -> None:
    """The command; :data:`HELP` says what it does."""
    from hvd_ckpt.app.cli.plan_models import build_asked
    from hvd_ckpt.prediction.computation import as_part
    from hvd_ckpt.utils.plain_data import named

    if name is None:
        raise BadArgument("--model is missing: give a name, a folder, or module:function")
    request = Request.of(others)
    try:
        model_options = named("--model-option", options)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    place = check_device(device)
    stages = None if request.layout is None else request.layout.stages
    if reason := rules.refusal({"stages": stages, "load": file}, rules.setting):
        raise BadArgument(f"--{reason}")
    # A plan file is read first: a model may take minutes to build.
    loaded = _load(file) if file is not None else None
    sizes = {size: value for size, value in others.items() if value is not None}
    job = build_asked(name, sizes, model_options, place)
    if tensor > 1:
        try:
            part = click.get_current_context().with_resource(as_part(job.model, tensor))
        except ValueError as error:
            raise BadArgument(f"--tensor {tensor}: {error}") from None
        job = job._replace(model=part)
    if loaded is not None:
        loaded = _fitting(loaded, job, request, place)
    folder = output_folder(output, "plan")
    try:
        chosen, baseline, unmet = _planned(job, loaded, request)
    except BudgetError as error:
        raise BadArgument(f"--budget {request.given}: {error}") from None
    _report(chosen, baseline, folder)
    if unmet is not None:
        nearest = unmet.smallest
        share = nearest / chosen.baseline.peak_bytes
        click.echo(
            f"Nearest budget: {nearest} ({show_bytes(nearest)}, {share:.2f}x), for which this plan is."
        )
        raise BadArgument(f"--budget {request.given}: {unmet}")
    if chosen.budget and chosen.measured and chosen.measured.peak_bytes > chosen.budget:
        over = chosen.measured.peak_bytes - chosen.budget
        click.echo(f"The plan's measured peak is {over} bytes over its budget of {chosen.budget}.", err=True)
        sys.exit(1)


@dataclass(frozen=True)
class Request:
    """The plan that is asked for.

    Attributes:
        given: its budget as it was given; None if it was not.
        budget: the same, parsed.
        precision: of the step.
        chunk_head: whether the head may be computed in chunks.
        layout: of pipeline stages, or None.
    """

    given: str | None
    budget: Budget
    precision: str
    chunk_head: bool
    layout: StageLayout | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Request:
        """Takes the options of a plan out of the command's.

        Raises:
            BadArgument: one is wrong, or is for stages and ``--stages`` is not given.
        """
        from hvd_ckpt.parallel.pipeline.stages import StageLayout

        given, precision, chunk_head = (options.pop(name) for name in ("budget", "precision", "chunk_head"))
        precision = precision or "fp32"
        names = ("stages", "chunks", "schedule", "param_scale")
        stages = take_options(options, names, "--stages, the number of stages")
        layout = None
        try:
            budget = parse_budget(given)
            if stages:
                layout = StageLayout(**stages)
        except ValueError as error:
            raise BadArgument(str(error)) from None
        return cls(given, budget, precision, chunk_head, layout)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, if the step runs under it."""
        from hvd_ckpt.distributed.precision import AUTOCAST

        return AUTOCAST.get(self.precision)


def _load(file: str) -> Plan:
    from hvd_ckpt.planning.plan import Plan, PlanError

    try:
        return Plan.load(file)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    except OSError as error:
        raise BadArgument(f"--load: cannot read '{file}': {error.strerror}") from None


def _fitting(loaded: Plan, job: PlannedModel, request: Request, device: torch.device) -> Plan:
    """The loaded plan, with the budget asked for, if it fits the model."""
    from hvd_ckpt.planning.plan import PlanError, sample_shapes

    try:
        loaded.check(job.model)
    except PlanError as error:
        raise BadArgument(f"--load: {error}") from None
    sample = sample_shapes(job.sample, job.kwargs)
    # The plan can be applied all the same, since its policies do not depend on shapes; only its numbers do.
    if sample != loaded.sample:
        made, given = (
            ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes)
            for shapes in (loaded.sample, sample)
        )
        click.echo(f"The plan was made for {made}, the batch is {given}: predictions do not hold.", err=True)
    if request.given is None:
        return loaded
    limit = request.budget.bytes(loaded.baseline.peak_bytes, loaded.smallest.peak_bytes, device)
    return dataclasses.replace(loaded, budget=limit)


def _planned(
    job: PlannedModel, loaded: Plan | None, request: Request
) -> tuple[Plan, Cost | None, BudgetError | None]:
    """The plan with its measured cost, that without recomputation (where it fits), and the error if it is only the nearest plan.
    A plan for stages is not measured."""
    from hvd_ckpt.planning.step import Step

    unmet = None
    with saying("planning") as say:
        if loaded is None:
            chosen, unmet = _made(job, request, say)
        else:
            chosen = loaded
        # One process cannot measure stages, whose costs are predicted from the blocks.
        if chosen.pipeline is not None:
            return chosen, None, unmet
        chosen, baseline = _measured(
            chosen, Step(job.model, job.sample, job.kwargs, job.loss, request.autocast), say
        )
    return chosen, baseline, unmet


def _made(job: PlannedModel, request: Request, say: Callable[[str], None]) -> tuple[Plan, BudgetError | None]:
    """The plan, or the one that comes nearest, with the error that says so."""
    from hvd_ckpt.planning.request import make_plan

    try:
        made = make_plan(
            job.model,
            *job.sample,
            budget=request.budget,
            layout=request.layout,
            kwargs=job.kwargs,
            loss=job.loss,
            autocast=request.autocast,
            chunk_head=request.chunk_head,
            say=say,
        )
        return made, None
    except BudgetError as error:
        if error.nearest is None:
            raise
        return error.nearest, error
    except ValueError as error:
        raise BadArgument(str(error)) from None


def _measured(chosen: Plan, step: Step, say: Callable[[str], None]) -> tuple[Plan, Cost | None]:
    """The plan with cost and timelines measured anew, and the cost without recomputation, if that was seen to fit; in turns."""
    from hvd_ckpt.planning.plan import Cost, applied, thinned
    from hvd_ckpt.utils.measure import undisturbed

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
                # A first step allocates what later ones reuse, so the second one is measured.
                peaks[name], timeline = step.peak()
                timelines[name] = thinned(timeline)
        for number in range(ROUNDS):
            say(f"timing, round {number + 1} of {ROUNDS}")
            # Rounds begin with each in turn, so that a machine that slows down favours neither.
            for name in forms if number % 2 == 0 else reversed(forms):
                with forms[name]():
                    seconds[name].append(step.seconds())
    costs = {name: Cost(peaks[name], statistics.median(seconds[name])) for name in forms}
    chosen = dataclasses.replace(chosen, measured=costs["after"], timelines=timelines)
    return chosen, costs.get("before")


def _report(chosen: Plan, baseline: Cost | None, folder: Path) -> None:
    """Prints the tables and writes the files."""
    from hvd_ckpt.app.cli import plan_show

    console = console_for_tables(WIDTH)
    plan_show.print_plan(chosen, console, baseline)
    chosen.save(folder / "plan.json")
    click.echo(f"Plan: {folder / 'plan.json'}")
    if chosen.pipeline is not None:
        plan_show.print_stages(chosen, console)
        return
    try:
        plan_show.frontier_plot(chosen, folder / "frontier.png", baseline)
        click.echo(f"Frontier: {folder / 'frontier.png'}")
        if any(chosen.timelines.values()):
            plan_show.timeline_plot(chosen, folder / "timeline.png", baseline)
            click.echo(f"Timeline: {folder / 'timeline.png'}")
    except ImportError as error:  # of matplotlib
        say_no_pictures(error)
