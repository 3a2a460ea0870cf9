"""Resuming a run: the snapshot to resume from, the schema of its state, its validation against the run, and loading of its weights.

The rest of its state is loaded by :class:`hvd_ckpt.snapshots.snapshots.Snapshots`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import horovod.torch as hvd
import torch
from pydantic import AllowInfNan, ConfigDict, Field, model_validator
from torch import nn

from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.collectives.agreement import of_first_process
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.stopping import STOP_FILE
from hvd_ckpt.snapshots.fits import PerRankState, ReplicatedState, check_fits, check_state as check_schemas
from hvd_ckpt.snapshots.lock import LOCK_FILE
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.reader import Snapshot, find_in
from hvd_ckpt.snapshots.schema import MAX_RANKS
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.folders import new_folder
from hvd_ckpt.utils.schema import Strict, Wrong
from hvd_ckpt.utils.states import NUMBER, Count, Positive, Weight

# Settings without which the state has no meaning.
FIXED = ("seed", "optimizer", "layer_decay", "freeze", "batch_norm", "replicas")
PLANNED = (
    "budget", "plan", "batch", "accumulate", "precision", "batch_norm", "model_options", "pipeline",
)  # fmt: skip
# Left by a start that was killed before it wrote config.yaml, from which it could be resumed, and by a request to stop it.
UNFINISHED = (LOCK_FILE, ".config.yaml.*", "plan.json", ".plan.json.*", STOP_FILE)

# ------------------------------------------------------------------------------------ where a run starts


@dataclass(frozen=True)
class ResumePoint:
    """The start of a run in a folder: its beginning, or a snapshot, on the disk or in memory."""

    folder: Path
    snapshot: Snapshot | None = None


def find_resume_point(config: Config) -> ResumePoint:
    """The run's folder and the snapshot to resume from, as rank 0 finds them. Collective: raises ConfigError on every rank if the
    folder is in use or cannot be written to, or has no snapshot to resume from."""
    point = None
    with (
        errors_everywhere("hvd_ckpt.train.folder"),
        config_errors(about="resume" if config.resume else "output"),
    ):
        # One process makes or reads the folder. What it finds is sent to the others.
        if current().number == 0 and config.resume:
            point = _resumed(Path(config.resume))
        elif current().number == 0:
            point = ResumePoint(new_folder(config.output, "train", not config.dry_run, UNFINISHED))
    found: ResumePoint = of_first_process(point, "hvd_ckpt.train.start")
    return found


def _resumed(path: Path) -> ResumePoint:
    path = path.resolve()
    # In the folder of one snapshot, the run resumes from it even if it has later ones.
    snapshot = find_in(path)
    if snapshot is not None and snapshot.path == path:
        if path.parent.name != "snapshots":
            raise ValueError(
                f"'{path}' is not in the folder 'snapshots' of a run: put it there, with the run's config.yaml"
            )
        return ResumePoint(path.parent.parent, snapshot)
    if snapshot is None and not (path / "config.yaml").is_file():
        raise ValueError(f"there is no snapshot in '{path}': give the folder of a run or of a snapshot")
    if snapshot is None:
        run_warnings.warn(f"'{path}' has no snapshot yet: the run starts from its beginning.")
    return ResumePoint(path, snapshot)


# ------------------------------------------------------------------------------------ state of a run


class Progress(Strict):
    """Progress of a run.

    Attributes:
        step: optimizer steps taken.
        position: samples that are used up.
        best: the lowest loss of an evaluation that was due.
        waited: evaluations since then.
        pending_evaluation: whether the run was stopped where an evaluation is due, which comes first when it resumes.
    """

    model_config = ConfigDict(frozen=False)

    step: Count = 0
    position: Count = 0
    best: Annotated[float, NUMBER] | None = None
    waited: Count = 0
    pending_evaluation: bool = False

    def evaluated(self, loss: float) -> None:
        """Counts an evaluation that was due."""
        if loss < (math.inf if self.best is None else self.best):
            self.best, self.waited = loss, 0
        else:
            self.waited += 1


class _Replicated(ReplicatedState):
    """State that is the same on every rank.

    ``logged``: the loss and terms of each part of a batch that the next entry of the log counts so far.
    """

    config: dict[str, Any]
    steps: Count
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    progress: Progress
    plan: str | None
    samples: Positive
    logged: list[tuple[Annotated[float, AllowInfNan(), NUMBER], Weight]]

    @model_validator(mode="after")
    def _has_replicas(self) -> _Replicated:
        if self.config.get("replicas") != (None if self.replicas is None else self.replicas.number):
            raise ValueError("replicas must be the state of as many replicas as config says")
        return self


SCHEMAS = _Replicated, PerRankState


# ------------------------------------------------------------------------------------ validation


def check_state(resumed: Snapshot) -> None:
    """Raises SnapshotError unless it holds what a run writes, by keys, types and ranges; names the first that is wrong."""
    with resumed.comparing():
        config = check_schemas(resumed, *SCHEMAS).config
        for name in (*FIXED, *PLANNED):
            if name not in config:
                raise Wrong(f"replicated.config has no {name}")
        try:
            # A damaged file may hold settings that no run accepts.
            Config.make(config)
        except ConfigError as error:
            raise Wrong(f"replicated.config: {error}") from None


def check_resumed(config: Config, samples: int, resumed: Snapshot) -> None:
    """Raises ConfigError if the run, which has so many samples to train on, cannot resume from the snapshot."""
    then = resumed.replicated["config"]
    for name in FIXED:
        if then[name] != getattr(config, name):
            raise ConfigError(
                f"{name} {getattr(config, name)}: the run that is to resume has {then[name]}, and its state needs it"
            )
    if resumed.replicated["samples"] != samples:
        raise ConfigError(
            f"resume: the run had {resumed.replicated['samples']} samples to train on and there are {samples} now: give the same "
            "data, sequence_length and validation_split"
        )


# ------------------------------------------------------------------------------------ loading


def read_snapshot(
    point: ResumePoint,
    config: Config,
    samples: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Snapshot | None:
    """Reads and validates the snapshot to resume from, and loads its weights on rank 0; None for the beginning. The optimizer is
    not yet distributed. Raises ConfigError or SnapshotError if the snapshot cannot be used, or is of another run."""
    if point.snapshot is None:
        return None
    # A new object: in an elastic job, each start reads values of its own.
    snapshot = dataclasses.replace(point.snapshot)
    check_state(snapshot)
    check_resumed(config, samples, snapshot)
    check_fits(snapshot, model, optimizer)
    # On the first rank, which reads those of all: the others get its weights before the first step, as in every start.
    if hvd.rank() == 0:
        ModelTensors(model).reading(snapshot)()
    return snapshot


def plan_text(config: Config, resumed: Snapshot | None) -> str | None:
    """The plan of the snapshot, if nothing has changed that it was made for."""
    if resumed is None:
        return None
    then, text = resumed.replicated["config"], resumed.replicated["plan"]
    same = all(then[name] == now for name, now in config.as_dict().items() if name in PLANNED)
    same = same and then.get("tensor", 1) == config.tensor
    return text if same else None
