"""What a run that goes on must have in common with the one that wrote its snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.snapshot import Snapshot
from hvd_ckpt.training.snapshot_folder import list_snapshots, remove

__all__ = ["Progress", "check_resumed", "later_snapshots", "plan_text", "remove_abandoned", "with_options"]

FIXED = ("seed", "optimizer", "batch_norm")  # a state under another of these would be no state
PLANNED = ("budget", "plan", "batch", "accumulate", "precision", "batch_norm", "model_options")


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: optimizer steps taken.
        position: samples of the stream that are used up.
        best: the lowest loss of an evaluation that was due.
        waited: evaluations since then.
    """

    step: int = 0
    position: int = 0
    best: float | None = None
    waited: int = 0


def check_resumed(config: Config, samples: int, resumed: Snapshot) -> None:
    """Raises ConfigError if the run cannot go on from the snapshot.

    Args:
        samples: that there are to train on.
    """
    then = resumed.common["config"]
    for name in FIXED:
        if then[name] != getattr(config, name):
            raise ConfigError(
                f"{name} {getattr(config, name)}: the run that is to go on has {then[name]}, and its state needs it"
            )
    if resumed.common["samples"] != samples:
        raise ConfigError(
            f"resume: the run had {resumed.common['samples']} samples to train on and there are {samples} now: give the same data, "
            "length and held-out share"
        )


def plan_text(config: Config, resumed: Snapshot | None) -> str | None:
    """The plan of the snapshot, if nothing has changed that it was made for."""
    if resumed is None:
        return None
    then, text = resumed.common["config"], resumed.common["plan"]
    same = all(then[name] == getattr(config, name) for name in PLANNED)
    return text if same else None


def with_options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Gives the parameter groups of an optimizer the options of these; a state that is loaded brings its own."""
    for group, options in zip(optimizer.param_groups, groups):
        group.update({name: value for name, value in options.items() if name != "params"})


def later_snapshots(folder: Path, step: int) -> list[Path]:
    """Snapshots in a folder of later steps than this."""
    return [path for path in list_snapshots(folder) if _step_of(path) > step]


def _step_of(path: Path) -> int:
    """Of a snapshot in place, ``step-00000120``, or of one that was being replaced, ``.step-00000120.old-01234567``."""
    return int(path.name.rpartition("step-")[2].partition(".")[0])


def remove_abandoned(abandoned: list[Path], written: Path) -> None:
    """Removes snapshots that the run, gone on from before them, will write anew, now that it has one of its own."""
    for path in abandoned:
        if path != written:
            remove(path)
    abandoned.clear()
