"""``hvd-ckpt plan``: make or load the plan of a run, measure it, and write tables, the plan and its pictures.

The exit status is 0 if the plan stays within its budget when measured, and 1 if it does not. It is 2 for an invalid argument, a
budget that cannot be met, or a plan file that cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, console_for_tables, output_folder, saying
from hvd_ckpt.app.cli.run_command import RunCommand
from hvd_ckpt.app.models.catalog import overview
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.utils.extras import say_no_pictures
from hvd_ckpt.utils.text import show_bytes

if TYPE_CHECKING:
    from torch import nn

    from hvd_ckpt.planning.budget import BudgetError
    from hvd_ckpt.planning.plan import Cost, Plan
    from hvd_ckpt.planning.step import Sample, Step


ROUNDS = 5  # of timing


def _plan(config: Config) -> None:
    from hvd_ckpt.app.training.build import first_step
    from hvd_ckpt.app.training.model import device_of
    from hvd_ckpt.app.training.optim import optimizer_of
    from hvd_ckpt.app.training.plans import plan_for
    from hvd_ckpt.distributed.precision import AUTOCAST
    from hvd_ckpt.planning.budget import BudgetError
    from hvd_ckpt.planning.step import Step
    from hvd_ckpt.prediction.computation import as_part

    device = device_of(config)
    model, sample_of = first_step(config, device)
    sample = sample_of(config.micro_batch)
    if config.tensor > 1:
        try:
            model = click.get_current_context().with_resource(as_part(model, config.tensor))
        except ValueError as error:
            raise BadArgument(f"--tensor {config.tensor}: {error}") from None
    loaded = None if config.plan is None else _loaded(config, model, sample)
    folder = output_folder(config.output, "plan")
    unmet: BudgetError | None = None
    try:
        chosen = loaded or plan_for(config, model, sample, optimizer_of(config, model))
    except BudgetError as error:
        if error.nearest is None:
            raise BadArgument(f"--budget {config.budget}: {error}") from None
        chosen, unmet = error.nearest, error
    except ValueError as error:
        raise ConfigError(str(error)) from None
    baseline = None
    # One process cannot measure stages, whose costs are predicted from the blocks.
    if chosen.pipeline is None:
        step = Step(model, sample, AUTOCAST.get(config.precision))
        with saying("plan") as say:
            chosen, baseline = _measured(chosen, step, say)
    try:
        _report(chosen, baseline, folder)
    except OSError as error:
        raise BadArgument(f"--output: cannot write to '{folder}': {error.strerror or error}") from None
    if unmet is not None:
        nearest = unmet.smallest
        share = nearest / chosen.baseline.peak_bytes
        click.echo(
            f"Nearest budget: {nearest} ({show_bytes(nearest)}, {share:.2f}x), for which this plan is."
        )
        raise BadArgument(f"--budget {config.budget}: {unmet}")
    if chosen.budget and chosen.measured and chosen.measured.peak_bytes > chosen.budget:
        over = chosen.measured.peak_bytes - chosen.budget
        click.echo(f"The plan's measured peak is {over} bytes over its budget of {chosen.budget}.", err=True)
        sys.exit(1)


def _loaded(config: Config, model: nn.Module, sample: Sample) -> Plan:
    """The configured plan, which fits the model; says so if its numbers are those of another batch."""
    from hvd_ckpt.app.training.plans import load_plan
    from hvd_ckpt.planning.plan import sample_shapes

    loaded = load_plan(Path(str(config.plan)), model, config.precision)
    shapes = sample_shapes(sample.args, sample.kwargs)
    # The plan can be applied all the same, since its policies do not depend on shapes; only its numbers do.
    if shapes != loaded.sample:
        made, given = (
            ", ".join(f"{dtype}{list(shape)}" for dtype, shape in each) for each in (loaded.sample, shapes)
        )
        click.echo(f"The plan was made for {made}, the batch is {given}: predictions do not hold.", err=True)
    return loaded


def _measured(chosen: Plan, step: Step, say: Callable[[str], None]) -> tuple[Plan, Cost | None]:
    """The plan with cost and timelines measured anew, and the cost without recomputation, if that was seen to fit; in turns."""
    from hvd_ckpt.planning.plan import Cost, applied
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
                peaks[name], timelines[name] = step.peak()
        say("timing")
        for number in range(ROUNDS):
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

    console = console_for_tables()
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


plan = RunCommand(
    "plan",
    f"""Choose what a model's forward pass keeps so that a training step fits a memory budget, and measure the step.

    The settings are those of `hvd-ckpt train`, as flags or in a YAML FILE. The step is that of a micro-batch; --plan measures the
    plan in a file instead of making one.

    Models: {overview()}; a folder of a Hugging Face model; or module:function. Without --data, such a function returns the model, a
    tuple of its sample arguments, and its loss (a function of its output) or None; it is called with the batch and the options.
    """,
    _plan,
)
