"""What a run that goes on must have in common with the one that wrote its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.snapshots import contents, structure
from hvd_ckpt.snapshots.hashed_file import DAMAGED
from hvd_ckpt.snapshots.resharding import check_shards
from hvd_ckpt.snapshots.snapshot import Snapshot
from hvd_ckpt.snapshots.snapshot_folder import Warn, list_snapshots, remove_all, step_of
from hvd_ckpt.training.config import Config, ConfigError

__all__ = [
    "Progress",
    "check_contents",
    "check_fits",
    "check_resumed",
    "later_snapshots",
    "plan_text",
    "remove_abandoned",
]

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
        pending_evaluation: it was stopped where an evaluation is due, which comes first when it goes on.
    """

    step: int = 0
    position: int = 0
    best: float | None = None
    waited: int = 0
    pending_evaluation: bool = False


def check_contents(resumed: Snapshot) -> None:
    """Raises ConfigError unless the snapshot holds what a run writes, by keys, types and ranges; names the first that is wrong."""
    stage = 0 if resumed.shards is None else resumed.shards.stage
    with _naming(resumed, DAMAGED):
        contents.check_common(resumed.common, _check_config, Progress, stage > 0)
        if resumed.own is not None:
            contents.check_own(resumed.own, stage)


def _check_config(value: Any, place: str) -> None:
    structure.texts_as_keys(value, place)
    for name in (*FIXED, *PLANNED):
        if name not in value:
            raise Wrong(f"{place} has no {name}")
    try:
        made = Config.make(value)
    except ConfigError as error:
        raise Wrong(f"{place}: {error}") from None
    for name, setting in made.as_dict().items():
        if name in value and (type(value[name]) is not type(setting) or value[name] != setting):
            raise Wrong(f"{place}.{name} is {structure.in_words(value[name])}, which no run writes")


def check_fits(resumed: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError unless weights, buffers and optimizer state are of this model and optimizer, by names and shapes.

    Args:
        resumed: that :func:`check_contents` has passed.
        model: whose weights they are to be.
        optimizer: as it was made, not yet the one that reduces.
    """
    with _naming(resumed, "give the settings that the run had, or another snapshot"):
        contents.check_weights(resumed.weights, model)
        if resumed.shards is None:
            contents.check_optimizer(resumed.common["optimizer"], optimizer)
        else:
            check_shards(resumed.shards, model, optimizer)
        contents.check_average_fits(resumed.common.get("ema"), "common.ema", model)
        if resumed.own is not None:
            contents.check_buffers(resumed.own["buffers"], model)


@contextmanager
def _naming(resumed: Snapshot, way_out: str) -> Iterator[None]:
    try:
        yield
    except Wrong as error:
        raise ConfigError(
            f"resume: the snapshot of step {resumed.step} cannot be used: {error}: {way_out}"
        ) from None


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


def later_snapshots(folder: Path, step: int) -> list[Path]:
    """Snapshots in a folder of later steps than this."""
    return [path for path in list_snapshots(folder) if step_of(path) > step]


def remove_abandoned(abandoned: list[Path], written: Path, warn: Warn | None = None) -> None:
    """Removes snapshots that the run, gone on from before them, will write anew, now that it has one of its own.

    Whenever the process is killed, there is a snapshot to go on from, and the newest is the old course's last or the new one,
    never one between: the new one is in place first; then the others lose their names, the oldest first; only then are their
    files removed, which may take long.

    Args:
        abandoned: the snapshots; empty when this returns.
        written: the new one, which may have the place of one of them.
        warn: is told which cannot be removed; by default it is a warning of Python's.
    """
    remove_all(sorted((path for path in abandoned if path != written), key=step_of), warn)
    abandoned.clear()
