"""The summary of a run before its first step."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.own import Stream
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.runtime import controller
from hvd_ckpt.utils.text import show_bytes

DEFAULT_DATA = {
    "tokens": "the standard library's source",
    "images": "scikit-learn's digits",
    "volumes": "synthetic ellipsoids",
}


class DryRun(Exception):
    """The configuration asks for the summary of the run alone."""


def print_summary(
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
    """Prints on rank 0 what a run is about to do, after ``taken`` of ``steps`` steps.

    Raises:
        DryRun: the configuration asks for nothing else; on every rank.
    """
    if current().number == 0:
        parameters = list(model.parameters())
        count, size = sum(one.numel() for one in parameters), sum(one.nbytes for one in parameters)
        units, unit = objective.units(train.batch([0], [0])), objective.unit
        own = DEFAULT_DATA.get(unit) if type(train).__module__.startswith("hvd_ckpt.") else None
        given = config.data or config.text or config.tokens or config.images or config.volumes
        source = given or own or type(train).__name__
        samples = config.batch * (config.replicas or hvd.size())
        each = "" if units == 1 else f", {samples * units:,} {unit}"
        owners = "on each rank" if config.stages == 1 else "on each replica"
        owners = owners if config.replicas is None else f"of each of {config.replicas} replicas"
        parts = "" if config.accumulate == 1 else f" in {config.accumulate} micro-batches"
        known = None if isinstance(train, Stream) else len(train)
        epochs = "" if known is None else f" ({(steps - taken) * samples / known:.3g} epochs)"
        amount = "a stream" if known is None else f"{known:,} samples"
        lines = {
            "model": f"{config.model}: {count:,} parameters, {show_bytes(size)}; {config.precision}",
            "data": f"{source}: {amount} to train on, {len(test or ()):,} to evaluate on",
            "step": f"{config.batch} samples {owners}{parts}: {samples:,} samples{each}",
            "steps": f"{steps - taken:,}{epochs}; {config.optimizer}, learning rate {config.lr:g}, {config.schedule}",
            "memory": _recomputation(config)
            + ("" if not config.shard_stage else f"; sharded: {config.shard}"),
            "ranks": f"{_ranks(config)} on {device}, CPU threads of each: {torch.get_num_threads()}",
            "folder": str(folder),
        }
        if config.is_local:
            lines["ranks"] += f"; local SGD, averages every {config.local_steps} steps"
        if taken:
            lines["steps"] += f"; resumes after step {taken:,} of {steps:,}"
        text = "\n".join(f"{name:<7} {line}" for name, line in lines.items())
        print(text, file=sys.stderr, flush=True)
    if config.dry_run:
        raise DryRun


def _ranks(config: Config) -> str:
    grid = current()
    if grid.size == 1:
        return "1"
    if grid.tensor > 1:
        stages = f"{grid.stages} pipeline stages ({config.pipeline_schedule}) of " if grid.stages > 1 else ""
        return f"{grid.size} over {controller()}, {stages}{grid.replicas} x {grid.tensor} (replicas x parts of a layer),"
    if grid.stages == 1:
        return f"{grid.size} over {controller()},"
    each = "1 replica" if grid.replicas == 1 else f"{grid.replicas} replicas"
    return f"{grid.size} over {controller()}, {grid.stages} pipeline stages of {each} ({config.pipeline_schedule}),"


def _recomputation(config: Config) -> str:
    if config.budget is not None:
        return f"planned for {config.budget}"
    if config.plan is not None:
        return f"the plan {config.plan}"
    if config.stages > 1 and config.checkpoint != "never":
        return f"each stage recomputes its blocks: {config.checkpoint}"
    if config.segments is not None:
        return f"recomputed in {config.segments} segments"
    return "no recomputation (--budget and --segments recompute)"
