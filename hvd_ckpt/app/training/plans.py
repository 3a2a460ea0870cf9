"""The plan of a run: read from a file, taken from the run that resumes, or made by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.modes import Stages, mode_of
from hvd_ckpt.app.training.prepare import OneRank, Start
from hvd_ckpt.app.training.resume import plan_text
from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.parallel.pipeline.stages import StageLayout
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.request import plan
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import of_first_process
from hvd_ckpt.snapshots.fits import state_after_a_step
from hvd_ckpt.utils.plain_data import write_text
from hvd_ckpt.utils.text import show_bytes


def choose_plan(config: Config, one: OneRank, start: Start) -> tuple[Plan | None, str | None]:
    """The configured plan, written to ``plan.json``, and its text. Collective.

    Planning runs the whole model, to which the plan is not applied yet, on the first samples.

    Raises:
        ConfigError: no plan stays within the budget, or the plan file cannot be read or does not fit; raised on every rank.
    """
    if config.budget is None and config.plan is None:
        return None, None
    file, first = start.folder / "plan.json", current().number == 0
    text = plan_text(config, start.snapshot)  # of the run's earlier plan, if it is still valid
    # The plan of the run before goes to the folder first, since a plan is loaded from a file, which errors name.
    if text is not None:
        with errors_everywhere("hvd_ckpt.train.plan_file"):
            if first:
                write_text(text, file)
    if text is None and config.plan is None:
        chosen = _make_plan(config, one)
    else:
        with errors_everywhere("hvd_ckpt.train.plan"):
            chosen = load_plan(
                Path(str(config.plan)) if text is None else file, one.parts.model, config.precision
            )
            _check_layout(chosen, config)
    if first:
        chosen.save(file)
        text = file.read_text("utf-8")
    return chosen, of_first_process(text, "hvd_ckpt.train.plan_text")


@watchdog.unlimited()
def _make_plan(config: Config, one: OneRank) -> Plan:
    """A plan for steps of micro-batches."""
    assert config.budget is not None
    (model, objective, train, _), device = one.parts, one.device
    count = min(config.micro_batch, len(train))
    with errors_everywhere("hvd_ckpt.train.sample"):
        sample = train.batch(range(count), [0] * count).to(device)
    layout: StageLayout | None = None
    if stages := _layout_of(config):
        layout = StageLayout(
            stages["stages"],
            stages["accumulate"],
            stages["schedule"],
            stages["virtual_stages"],
            _param_scale(one.optimizer, config),
        )
        if current().number == 0:
            # The model is cut after planning, so it is still on the CPU; only the process that plans needs it on a device.
            model.to(device)
    try:
        return plan(
            model,
            *sample.inputs,
            kwargs=sample.shared,
            loss=lambda output: objective.loss(output, sample),
            budget=config.budget.limit,
            autocast=AUTOCAST.get(config.precision),
            chunk_head=config.budget.chunk_head,
            verbose=True,
            cache=config.budget.cache,
            layout=layout,
        )
    except ValueError as error:
        raise ConfigError(f"budget {config.budget}: {error}") from None
    finally:
        if layout is not None:
            model.to("cpu")


def _param_scale(optimizer: torch.optim.Optimizer, config: Config) -> float:
    """Bytes of a parameter with its gradient, optimizer state and average on each rank, for each byte of the parameter alone."""
    # What an optimizer keeps for one parameter stands for all. Entries of the parameter's size take memory, and others, such as
    # the step, hardly any.
    parameter = optimizer.param_groups[0]["params"][0]
    entries = state_after_a_step(optimizer)[0]
    kept = sum(
        isinstance(entry, torch.Tensor) and entry.shape == parameter.shape for entry in entries.values()
    )
    # Optimizer state with average, gradients and parameters, and whether they are split over the ranks.
    parts = (
        (kept + (config.ema is not None), config.shard.stage > 0),
        (1, config.shard.stage > 1),
        (1, config.shard.stage > 2),
    )
    return sum(part / hvd.size() if split else float(part) for part, split in parts)


def _check_layout(made: Plan, config: Config) -> None:
    """Raises ConfigError if a plan is for other pipeline stages than configured."""
    cuts, layout = made.pipeline, _layout_of(config)
    planned: dict[str, Any] = {}
    if cuts is not None:
        planned = {
            "stages": cuts.stages,
            "accumulate": cuts.micro_batches,
            "schedule": cuts.schedule,
            "virtual_stages": cuts.virtual_stages,
        }
    if bool(planned) != bool(layout):
        other = f"in {planned['stages']} stages" if planned else "without stages"
        raise ConfigError(
            f"plan {config.plan}: it is for a model {other}, make one with `hvd-ckpt plan --stages {layout.get('stages', 1)}`"
        )
    for setting, expected in planned.items():
        given = layout[setting]
        if expected != given:
            raise ConfigError(f"{setting} {given}: the plan {config.plan} was made for {expected}, give that")


def _layout_of(config: Config) -> dict[str, Any]:
    """The settings of the pipeline that a plan is for; empty without stages."""
    if mode_of(config) is not Stages:
        return {}
    return {
        "stages": config.pipeline.stages,
        "accumulate": config.accumulate,
        "schedule": config.pipeline.schedule,
        "virtual_stages": config.pipeline.virtual_stages_of_each,
    }


def load_plan(file: Path, model: nn.Module, precision: str) -> Plan:
    """The plan in a file, if it fits the model and was made in this precision.

    Raises:
        ConfigError: it cannot be read or does not fit.
    """
    try:
        loaded = Plan.load(file)
        loaded.check(model)
    except PlanError as error:
        raise ConfigError(f"plan: {error}") from None
    except OSError as error:
        raise ConfigError(f"plan: cannot read '{file}': {error.strerror}") from None
    # A plan knows the dtype of its autocast, and a run its precision.
    made = next(
        (name for name, dtype in AUTOCAST.items() if str(dtype) == f"torch.{loaded.autocast}"), "fp32"
    )
    # Only precisions under autocast change the bytes that blocks keep; all others count as fp32.
    if made != precision and {made, precision} & AUTOCAST.keys():
        raise ConfigError(
            f"plan '{file}': it was made for precision {made}, and this run's is {precision}, with another peak: make "
            f"one with `hvd-ckpt plan --precision {precision}`, or give budget instead"
        )
    return loaded


def planned_peak(plan: Plan | None) -> str | None:
    """The measured peak that a plan's budget limits, in words; None without a plan."""
    if plan is None or plan.measured is None:
        return None
    budget = "" if plan.budget is None else f" of {show_bytes(plan.budget)} budgeted"
    return f"step's peak {show_bytes(plan.measured.peak_bytes)}{budget}"
