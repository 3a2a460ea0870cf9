"""Resuming a run: the snapshot to resume from, its validation against the run, and loading of its weights.

The rest of its state is loaded by :class:`hvd_ckpt.snapshots.snapshots.Snapshots`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvd_ckpt.folders import new_folder
from hvd_ckpt.grid import current
from hvd_ckpt.reduction.agreement import of_first_process
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.snapshots.reader import Snapshot, find, read
from hvd_ckpt.snapshots.stopping import forget_file
from hvd_ckpt.snapshots.tensors import map_tensors
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.local import check_period
from hvd_ckpt.training.state import FIXED, PLANNED, check_fits, check_state

# ------------------------------------------------------------------------------------ where a run starts


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        folder: of the run.
        snapshot: on the disk, to resume from; None for the beginning.
        commit: a snapshot in memory, to resume from instead.
    """

    folder: Path
    snapshot: Path | None = None
    commit: Snapshot | None = None

    def read(self) -> Snapshot | None:
        """The state to resume from; None for the beginning.

        Raises:
            SnapshotError: the snapshot cannot be used.
        """
        if self.commit is not None:  # an optimizer keeps the tensors that it loads
            own = map_tensors(self.commit.replicated, "state", lambda tensor, _: tensor.clone())
            return dataclasses.replace(self.commit, ranks=hvd.size(), replicated=own)
        return None if self.snapshot is None else read(self.snapshot, hvd.rank())


def find_resume_point(config: Config) -> ResumePoint:
    """The run's folder and the snapshot to resume from, as rank 0 finds them. Collective.

    Raises:
        ConfigError: the folder is in use or cannot be written to, or has no snapshot to resume from; on every rank.
    """
    answer: ResumePoint | str = ""
    if current().number == 0:
        try:
            if config.resume:
                answer = _resumed(Path(config.resume))
            else:
                answer = ResumePoint(new_folder(config.output, "train", make=not config.dry_run))
            if not config.dry_run:
                forget_file(answer.folder)
        except ValueError as error:
            answer = f"resume: {error}" if config.resume else f"output: {error}"
    answer = of_first_process(answer, "hvd_ckpt.train.folder")
    if isinstance(answer, str):
        raise ConfigError(answer)
    return answer


def _resumed(path: Path) -> ResumePoint:
    if (path / "manifest.json").is_file():
        path = path.resolve()
        if path.parent.name != "snapshots":
            raise ValueError(
                f"'{path}' is not in the folder 'snapshots' of a run: put it there, with the run's config.yaml"
            )
        return ResumePoint(path.parent.parent, path)
    found = find(path / "snapshots")
    if found is None and not (path / "config.yaml").is_file():
        raise ValueError(f"there is no snapshot in '{path}': give the folder of a run or of a snapshot")
    if found is None:
        warnings.warn(f"'{path}' has no snapshot yet: the run starts from its beginning.", stacklevel=1)
        return ResumePoint(path.resolve())
    return ResumePoint(path.resolve(), found.resolve())


# ------------------------------------------------------------------------------------ loading


def read_snapshot(
    point: ResumePoint,
    config: Config,
    samples: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Snapshot | None:
    """Reads and validates the snapshot to resume from, and loads its weights; None for the beginning.

    Args:
        samples: that there are to train on.
        optimizer: of the model, not yet distributed.

    Raises:
        ConfigError, SnapshotError: the snapshot cannot be used, or is of another run.
    """
    snapshot = point.read()
    if snapshot is not None:
        check_state(snapshot)
        check_resumed(config, samples, snapshot)
        check_fits(snapshot, model, optimizer)
        try:
            model.load_state_dict(snapshot.weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"resume {config.resume}: the snapshot is of another model: {reason}") from None
    return snapshot


def check_resumed(config: Config, samples: int, resumed: Snapshot) -> None:
    """Raises ConfigError if the run cannot resume from the snapshot.

    Args:
        samples: that there are to train on.
    """
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
    check_period(config, resumed)


def plan_text(config: Config, resumed: Snapshot | None) -> str | None:
    """The plan of the snapshot, if nothing has changed that it was made for."""
    if resumed is None:
        return None
    then, text = resumed.replicated["config"], resumed.replicated["plan"]
    same = all(then[name] == getattr(config, name) for name in PLANNED)
    return text if same else None


def average_weights(optimizer: Any, decay: float | None) -> AveragedWeights | None:
    """The exponential moving average of a ``DistributedOptimizer``'s weights, which begins with them; None without a decay."""
    if decay is None:
        return None
    return AveragedWeights(optimizer, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def replica_entries(logged: Sequence[tuple[float, float]]) -> list[tuple[float, ...]]:
    """The open entries of the logs of all logical replicas, in their order. Collective.

    Args:
        logged: of each of this rank's replicas.
    """
    of_all: Tensor = hvd.allgather(torch.tensor(logged, dtype=torch.float64), name="hvd_ckpt.train.logged")
    return [tuple(pair) for pair in of_all.tolist()]
