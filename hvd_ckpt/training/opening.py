"""What a run is about to do, told before it does anything that takes long."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.planning.budget import show_bytes
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.runtime import controller
from hvd_ckpt.training.config import Config

__all__ = ["DryRun", "open_run", "peak_of"]

OWN_DATA = {
    "tokens": "the standard library's source",
    "images": "scikit-learn's digits",
    "volumes": "synthetic ellipsoids",
}


class DryRun(Exception):
    """The configuration asks for no more than to be told what the run is about to do."""


def open_run(
    config: Config,
    model: nn.Module,
    objective: Objective,
    train: Dataset,
    test: Dataset | None,
    folder: Path,
    device: torch.device,
    taken: int,
    steps: int,
) -> None:
    """Prints on rank 0 what a run is about to do.

    Args:
        taken: steps taken before.
        steps: of the whole run.

    Raises:
        DryRun: that was all; on every rank.
    """
    if hvd.rank() == 0:
        parameters = list(model.parameters())
        count, size = sum(one.numel() for one in parameters), sum(one.nbytes for one in parameters)
        units, unit = objective.units(train.batch([0], [0])), objective.unit
        samples = config.batch * hvd.size()
        each = "" if units == 1 else f", {samples * units:,} {unit}"
        parts = "" if config.accumulate == 1 else f" in {config.accumulate} micro-batches"
        epochs = (steps - taken) * samples / len(train)
        lines = {
            "model": f"{config.model}: {count:,} parameters, {show_bytes(size)}; {config.precision}",
            "data": f"{_source(config, train, unit)}: {len(train):,} samples to train on, {len(test or ()):,} to evaluate on",
            "step": f"{config.batch} samples on each rank{parts}: {samples:,} samples{each}",
            "steps": f"{steps - taken:,} ({epochs:.3g} epochs); {config.optimizer}, learning rate {config.lr:g}, {config.schedule}",
            "memory": _memory(config),
            "ranks": f"{hvd.size()} over {controller()}, on {device}, CPU threads of each: {torch.get_num_threads()}",
            "folder": str(folder),
        }
        if taken:
            lines["steps"] += f"; resumes after step {taken:,} of {steps:,}"
        text = "\n".join(f"{name:<7} {line}" for name, line in lines.items())
        print(text, file=sys.stderr, flush=True)
    if config.dry_run:
        raise DryRun


def peak_of(plan: Plan | None) -> str | None:
    """The peak that a plan's budget is about, as it was measured; None without a plan."""
    if plan is None or plan.measured is None:
        return None
    budget = "" if plan.budget is None else f" of {show_bytes(plan.budget)} budgeted"
    return f"step's peak {show_bytes(plan.measured.peak_bytes)}{budget}"


def _source(config: Config, train: Dataset, unit: str) -> str:
    kind = type(train)
    own = OWN_DATA.get(unit) if kind.__module__.startswith("hvd_ckpt.") else None
    return str(config.text or config.images or config.volumes or own or kind.__name__)


def _memory(config: Config) -> str:
    split = "" if not config.stage else f"; split over the ranks: {config.shard}"
    if config.budget is not None:
        return f"a plan, to be made for {config.budget}{split}"
    if config.plan is not None:
        return f"the plan {config.plan}{split}"
    if config.segments is not None:
        return f"recomputed in {config.segments} segments{split}"
    return f"everything is kept for the backward pass (--budget and --segments recompute){split}"
