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


SMALL = {"width": 32, "layers": 3, "heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "bert-tiny": SMALL,
    "xlnet-tiny": SMALL,
    "gpt-tiny": {**SMALL, "dropout": 0.1},
    "lstm-medium": {"width": 24},
    "resnet-20": {},
    "vnet": {"width": 2},
}
PIXELS = {"resnet-20": 8, "vnet": 16}


def settings(name: str, text: Path, **changes: Any) -> dict[str, Any]:
    """Those of a short run of a model, on a text or on drawn images."""
    values = {"model": name, "model_options": MODELS[name], "steps": 3, "batch": 4, "lr": 1e-2}
    data = {"pixels": PIXELS[name]} if name in PIXELS else {"data": f"text:{text}", "sequence_length": 16}
    return {**values, "eval_batches": 1, **data, **changes}


def write_text(folder: Path, size: int = 5700) -> Path:
    """A text of all ranks."""
    if hc.rank() == 0:
        (folder / "text.txt").write_bytes((bytes(range(32, 127)) * 60)[:size])
    hc.barrier()
    return folder / "text.txt"


def final_weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Those of the snapshot at the end of a run."""
    found = found_in(outcome.folder / "snapshots")
    assert found is not None and found.name == f"step-{outcome.steps:08}"
    return read_snapshot(found).weights
