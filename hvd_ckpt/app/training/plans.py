"""The plan of a run: read from a file, taken from the run that resumes, or made by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hvd_ckpt.app.training.build import sample_of
from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.field_types import Planned
from hvd_ckpt.app.training.resume import plan_text
from hvd_ckpt.collectives.agreement import of_first_process
from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.parallel.pipeline.stages import StageLayout
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.request import plan
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.prediction.memory import Estimator
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.utils.plain_data import write_text

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


def choose_plan(trainer: Trainer, resumed: Snapshot | None) -> tuple[Plan | None, str | None]:
    """The configured plan of a run that is not distributed yet, written to ``plan.json``, and its text. Collective.

    Planning runs the whole model, to which the plan is not applied yet, on the first samples.

    Raises:
        ConfigError: no plan stays within the budget, or the plan file cannot be read or does not fit; raised on every rank.
    """
    config = trainer.config
    if config.budget is None and config.plan is None:
        return None, None
    file, first = trainer.folder / "plan.json", current().number == 0
    text = plan_text(config, resumed)  # of the run's earlier plan, if it is still valid
    chosen: Plan | None = None
    # One process reads the plan, whose file other hosts may lack.
    with errors_everywhere("hvd_ckpt.train.plan_file"):
        if first and (text is not None or config.plan is not None):
            given = Path(str(config.plan)) if text is None else file
            if text is not None:  # a plan is loaded from a file, which errors name
                with config_errors(OSError, about="plan"):
                    write_text(text, file)
            chosen = load_plan(given, trainer.model, config.precision)
            _check_stages(chosen, config)
    chosen = of_first_process(chosen, "hvd_ckpt.train.plan") or _make_plan(trainer)
    with errors_everywhere("hvd_ckpt.train.plan_saved"), config_errors(OSError, about="plan"):
        if first:
            chosen.save(file)
            text = file.read_text("utf-8")
    return chosen, of_first_process(text, "hvd_ckpt.train.plan_text")


@watchdog.unlimited()
def _make_plan(trainer: Trainer) -> Plan:
    """A plan for steps of micro-batches."""
    config, model, objective = trainer.config, trainer.model, trainer.objective
    count = min(config.micro_batch, len(trainer.train))
    with errors_everywhere("hvd_ckpt.train.sample"):
        sample = sample_of(trainer.train, range(count), objective, trainer.device)
    if config.in_stages and current().number == 0:
        # The model is cut after planning, so it is still on the CPU; only the process that plans needs it on a device.
        model.to(trainer.device)
    try:
        return plan_for(config, model, sample, trainer.optimizer)
    except ValueError as error:
        raise ConfigError(f"budget {config.budget}: {error}") from None
    finally:
        if config.in_stages:
            model.to("cpu")


def plan_for(config: Config, model: nn.Module, sample: Sample, optimizer: torch.optim.Optimizer) -> Plan:
    """The plan that a configuration asks for, or the fastest one. Collective in a job.

    Args:
        sample: a micro-batch.
        optimizer: optimizer of the model, not yet distributed.

    Raises:
        ValueError, BudgetError: as of :func:`hvd_ckpt.plan`.
    """
    budget = config.budget or Planned(limit="fastest")
    layout = None
    if config.in_stages:
        pipeline = config.pipeline
        layout = StageLayout(
            pipeline.stages,
            config.accumulate,
            pipeline.schedule,
            pipeline.virtual_stages_of_each,
            _param_scale(model, optimizer, config),
        )
    return plan(
        model,
        *sample.args,
        kwargs=sample.kwargs,
        loss=sample.loss,
        budget=budget.limit,
        autocast=AUTOCAST.get(config.precision),
        chunk_head=budget.chunk_head,
        verbose=True,
        cache=budget.cache,
        layout=layout,
    )


def _param_scale(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> float:
    """Bytes of a trained parameter with its gradient, optimizer state and average on each rank, for each byte of it alone."""
    shard, ranks = config.shard, current().replicas
    estimator = Estimator(model, optimizer, averaged=config.ema is not None)
    states = estimator.estimate(ranks, shard.states, shard.offload, shard.wire)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    kept = states.model_state + states.averages - frozen / (ranks if shard.stage == 3 else 1)
    return max(kept / trained, 0.0)  # of frozen parameters that are offloaded, nothing is kept


def _check_stages(made: Plan, config: Config) -> None:
    """Raises ConfigError if a plan is for other pipeline stages than configured."""
    cuts, pipeline = made.pipeline, config.pipeline
    if (cuts is not None) != config.in_stages:
        other = "without stages" if cuts is None else f"in {cuts.stages} stages"
        raise ConfigError(
            f"plan {config.plan}: it is for a model {other}, make one with `hvd-ckpt plan --pipeline {pipeline.stages}`"
        )
    if cuts is not None:
        for setting, planned, given in (
            ("stages", cuts.stages, pipeline.stages),
            ("accumulate", cuts.micro_batches, config.accumulate),
            ("schedule", cuts.schedule, pipeline.schedule),
            ("virtual_stages", cuts.virtual_stages, pipeline.virtual_stages_of_each),
        ):
            if planned != given:
                raise ConfigError(
                    f"{setting} {given}: the plan {config.plan} was made for {planned}, give that"
                )


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
    precisions = {str(dtype): name for name, dtype in AUTOCAST.items()}
    made = precisions.get(f"torch.{loaded.autocast}", "fp32")
    # Only precisions under autocast change the bytes that blocks keep; all others count as fp32.
    if made != precision and {made, precision} & AUTOCAST.keys():
        raise ConfigError(
            f"plan '{file}': it was made for precision {made}, and this run's is {precision}, with another peak: make "
            f"one with `hvd-ckpt plan --precision {precision}`, or give budget instead"
        )
    return loaded
