"""How a model in training recomputes: by a plan made for it, by a plan from a file, by segments, or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_ckpt.models.batch import Batch
from hvd_ckpt.models.chain import Chain
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.planning import Plan, PlanError, plan
from hvd_ckpt.recompute import CheckpointSequential, DeferredBatchNorm, SyncBatchNorm
from hvd_ckpt.training.config import ConfigError

__all__ = ["in_segments", "load_plan", "make_plan", "with_batch_norm"]


def with_batch_norm(model: nn.Module, kind: str) -> nn.Module:
    """The model with batch norms of that kind (one of :data:`~hvd_ckpt.training.config.BATCH_NORMS`).

    Raises:
        ConfigError: it has none, and they are asked to be other than local.
    """
    if kind == "local":
        return model
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
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


def make_plan(
    model: nn.Module, sample: Batch, objective: Objective, budget: str | int, autocast: torch.dtype | None
) -> Plan:
    """A plan for steps of micro-batches like ``sample``, with forward pass and loss under autocast to that dtype; collective.

    Raises:
        BudgetError: no plan stays within the budget.
    """
    return plan(
        model,
        *sample.inputs,
        kwargs=sample.shared,
        loss=lambda output: objective.loss(output, sample),
        budget=budget,
        autocast=autocast,
    )


def load_plan(file: Path, model: nn.Module) -> Plan:
    """The plan in a file, if it fits the model.

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
    return loaded
