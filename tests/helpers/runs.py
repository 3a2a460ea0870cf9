"""Runs of the training loop on the ranks of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from snapshot_files import found_in, read_snapshot

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.trainer import Outcome, Trainer


def trainer_of(
    folder: Path,
    settings: dict[str, Any],
    model: torch.nn.Module | None = None,
    objective: Callable[[Any], Any] = lambda objective: objective,
    data: Callable[[Any], Any] = lambda data: data,
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """The trainer of a run in a folder, unless it resumes; with a model, objective or data in place of the configured ones."""
    place = {} if "resume" in settings else {"output": str(folder)}
    config = Config.make({**place, **settings})
    parts = assemble(config)
    return kind(config, model or parts.model, objective(parts.objective), data(parts.train), parts.test)


def run(trainer: Trainer) -> Outcome:
    """Trains to the end on all ranks."""
    outcome = trainer.run()
    hc.barrier()  # rank 0 removes old snapshots at the end
    return outcome


def final_weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Those of the snapshot at the end of a run."""
    found = found_in(outcome.folder / "snapshots")
    assert found is not None and found.name == f"step-{outcome.steps:08}"
    return read_snapshot(found).weights
