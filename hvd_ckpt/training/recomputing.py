"""How a model in training recomputes: by a plan made for it, by a plan from a file, by segments, or not at all."""

from __future__ import annotations

from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import global_process_set
from torch import nn

from hvd_ckpt import stall
from hvd_ckpt.batchnorm import DeferredBatchNorm, SyncBatchNorm
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.json_file import write_text
from hvd_ckpt.models.chain import Chain
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.planning.budget import BudgetError
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.planner import plan
from hvd_ckpt.recompute import CheckpointSequential
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.torch_private import AnyBatchNorm
from hvd_ckpt.training.agreement import errors_everywhere
from hvd_ckpt.training.config import Config, ConfigError

__all__ = ["in_segments", "load_plan", "plan_of_run", "with_batch_norm"]

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_batch_norm(model: nn.Module, kind: str) -> nn.Module:
    """The model with batch norms of that kind (one of :data:`~hvd_ckpt.training.config.BATCH_NORMS`).

    Raises:
        ConfigError: it has none, and they are asked to be other than local.
    """
    if kind == "local":
        return model
    if not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        raise ConfigError(f"batch_norm {kind}: this {type(model).__name__} has no batch norm, leave it out")
    return SyncBatchNorm.convert(model) if kind == "synchronized" else DeferredBatchNorm.convert(model)


def in_segments(model: nn.Module, segments: int, use_reentrant: bool) -> nn.Module:
    """The model recomputed in that many segments.

    Raises:
        ConfigError: it is no chain, or has fewer blocks.
    """
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"segments {segments}: this {type(model).__name__} is no chain of blocks, give a budget instead"
        )
    if segments > len(model):
        raise ConfigError(f"segments {segments}: this model has {len(model)} blocks, give at most that many")
    if isinstance(model, Chain):
        model.checkpoint_interval = -(-len(model) // segments)
        model.use_reentrant = use_reentrant
        return model
    return CheckpointSequential(model, segments, use_reentrant)


def plan_of_run(
    model: nn.Module,
    config: Config,
    train: Dataset,
    objective: Objective,
    device: torch.device,
    folder: Path,
    text: str | None,
) -> tuple[Plan | None, str | None]:
    """The plan that the configuration asks for, applied to the model and written to ``plan.json``, and its text. Collective.

    Args:
        train: its first samples are planned with.
        folder: of the run.
        text: of the plan that the run had before, if it serves still.

    Raises:
        ConfigError: no plan stays within the budget, or the plan file cannot be read or does not fit.
    """
    if config.budget is None and config.plan is None:
        return None, None
    file = folder / "plan.json"
    if text is not None and hvd.rank() == 0:
        write_text(text, file)
    if text is not None or config.plan is not None:
        hvd.barrier()
        with errors_everywhere("hvd_ckpt.train.plan"):
            made = load_plan(file if text is not None else Path(str(config.plan)), model, config.precision)
    else:
        made = _make(model, config, train, objective, device)
    if hvd.rank() == 0:
        made.save(file)
        text = file.read_text("utf-8")
    made.apply(model)
    return made, broadcast_from(text, 0, global_process_set, "hvd_ckpt.train.plan_text")


@stall.unlimited()
def _make(
    model: nn.Module, config: Config, train: Dataset, objective: Objective, device: torch.device
) -> Plan:
    """A plan for steps of micro-batches."""
    count = min(config.micro_batch, len(train))
    with errors_everywhere("hvd_ckpt.train.sample"):
        sample = train.batch(range(count), [0] * count).to(device)
    try:
        return plan(
            model,
            *sample.inputs,
            kwargs=sample.shared,
            loss=lambda output: objective.loss(output, sample),
            budget=config.budget,
            autocast=AUTOCAST.get(config.precision),
            verbose=True,
        )
    except BudgetError as error:
        raise ConfigError(f"budget {config.budget}: {error}") from None


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
    made = next(
        (name for name, dtype in AUTOCAST.items() if str(dtype) == f"torch.{loaded.autocast}"), "fp32"
    )
    if made != precision and {made, precision} & AUTOCAST.keys():
        raise ConfigError(
            f"plan '{file}': it was made for precision {made}, and this run's is {precision}, and its peak another one: make "
            f"one with `hvd-ckpt plan --precision {precision}`, or give budget instead"
        )
    return loaded
