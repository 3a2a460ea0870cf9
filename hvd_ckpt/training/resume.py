"""Resuming a run: the snapshot to resume from, its validation against the run, and loading of its state.

The optimizer's state is validated and resharded by :mod:`hvd_ckpt.snapshots.resume`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvd_ckpt.folders import new_folder
from hvd_ckpt.grid import current
from hvd_ckpt.precision import GradScaler
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.sharding.state import load_parts, ranges_of
from hvd_ckpt.snapshots.content import RunShards
from hvd_ckpt.snapshots.folder import Warn, list_snapshots, remove, step_of
from hvd_ckpt.snapshots.random_state import set_random_state
from hvd_ckpt.snapshots.reader import Snapshot, find, read
from hvd_ckpt.snapshots.resume import read_shards
from hvd_ckpt.snapshots.schema import libraries
from hvd_ckpt.snapshots.tensors import map_tensors
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.ending import errors_everywhere, forget_file, of_first_process
from hvd_ckpt.training.report import Report
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


def plan_text(config: Config, resumed: Snapshot | None) -> str | None:
    """The plan of the snapshot, if nothing has changed that it was made for."""
    if resumed is None:
        return None
    then, text = resumed.replicated["config"], resumed.replicated["plan"]
    same = all(then[name] == getattr(config, name) for name in PLANNED)
    return text if same else None


def load_state(
    snapshot: Snapshot,
    expected: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    optimizer: Any,
    shards: RunShards,
    average: AveragedWeights | None,
    scaler: GradScaler | None,
    report: Report,
) -> None:
    """Loads everything but the weights. Collective.

    Args:
        expected: the state that the optimizer keeps of each shard, from before it was distributed.
        optimizer: the ``DistributedOptimizer``.
        report: continues the open entry of its log.
    """
    parts = None
    with errors_everywhere("hvd_ckpt.train.parts"):
        if snapshot.sharding is not None:
            parts = read_shards(snapshot, ranges_of(optimizer), expected, len(optimizer.param_groups))
        elif current().stages > 1:  # each of which has a part of what is whole there
            sizes = {name: one.numel() for name, one in snapshot.weights.items()}
            pieces = [[name, 0, sizes[name]] for name in expected]
            parts = [{**snapshot.replicated["optimizer"], "pieces": pieces}]
    load_optimizer(snapshot, parts, optimizer)
    shards.publish_weights(optimizer)
    if average is not None:
        _load_average(average, snapshot.replicated["ema"], parts if snapshot.sharding is not None else None)
    with errors_everywhere("hvd_ckpt.train.resume"):
        if scaler is not None and snapshot.replicated["scaler"] is not None:
            scaler.load_state_dict(snapshot.replicated["scaler"])
        same_ranks = snapshot.replicas == hvd.size() and bool(snapshot.per_stage)
        if current().number == 0 and (same_ranks or optimizer.replicas is not None):
            _warn_of_changes(snapshot, next(model.parameters()).device.type)
        if same_ranks:
            _load_rank_state(snapshot, model, optimizer, report)
        if optimizer.replicas is not None:
            state = snapshot.replicated["replicas"]
            optimizer.replicas.load_state_dict(state)
            report.resume([state["logged"][index] for index in optimizer.replicas.indices])


def load_optimizer(snapshot: Snapshot, parts: Sequence[Mapping[str, Any]] | None, optimizer: Any) -> None:
    """Loads the optimizer's state, from ``parts`` if it was sharded; the options of its groups stay as they are. Collective."""
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    if parts is None:
        optimizer.load_state_dict(snapshot.replicated["optimizer"])
    else:
        load_parts(optimizer, parts)
    for group, kept in zip(optimizer.param_groups, options):
        group.update(kept)


def _load_rank_state(snapshot: Snapshot, model: nn.Module, optimizer: Any, report: Report) -> None:
    """Loads this rank's own state. Without it a rank draws new random states, and learns anew when gradients are final.

    Its random state is the same on all pipeline stages; its buffers are on the stages of their blocks. The reducer learns anew if
    there were other stages.
    """
    per_rank = snapshot.per_rank
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for state in snapshot.per_stage:
            for name, value in state["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(value)
    stage, grid = 0 if snapshot.sharding is None else snapshot.sharding.stage, current()
    if getattr(optimizer, "shard_stage", 0) == stage and snapshot.pipeline_stages == grid.stages:
        optimizer.load_reduction_state_dict(snapshot.per_stage[grid.stage]["reduction"])
    report.resume(per_rank["logged"])
    set_random_state(per_rank["random"])


def _warn_of_changes(snapshot: Snapshot, device: str) -> None:
    """Warns in one line of what may change the bits of the run's results: threads, kind of device, versions."""
    then = {"device": snapshot.replicated["device"], "CPU threads a rank": snapshot.replicated["threads"]}
    now: dict[str, Any] = {"device": device, "CPU threads a rank": torch.get_num_threads()}
    if snapshot.manifest is not None:
        then.update(snapshot.manifest.libraries)
        now.update({name: libraries()[name] for name in ("torch", "hvd_ckpt", "horovod")})
    changed = [
        f"{name} {then[name]} (now {now[name]})" for name in now if then.get(name, now[name]) != now[name]
    ]
    if changed:
        warnings.warn(
            f"The run had {', '.join(changed)}: the bits of its results may change; give the same for the same, such as "
            f"OMP_NUM_THREADS={snapshot.replicated['threads']}.",
            stacklevel=2,
        )


def replica_state(optimizer: Any, logged: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """The state of all logical replicas; None where there are none. Collective.

    Args:
        logged: of each of this rank's replicas the open entry of the log.
    """
    if optimizer.replicas is None:
        return None
    optimizer.replicas.average_buffers()  # for the weights of the snapshot
    of_all: Tensor = hvd.allgather(torch.tensor(logged, dtype=torch.float64), name="hvd_ckpt.train.logged")
    return {**optimizer.replicas.state_dict(), "logged": [tuple(pair) for pair in of_all.tolist()]}


# ------------------------------------------------------------------------------------ averaged weights


def average_weights(optimizer: Any, decay: float | None) -> AveragedWeights | None:
    """The exponential moving average of a ``DistributedOptimizer``'s weights, which begins with them; None without a decay."""
    if decay is None:
        return None
    return AveragedWeights(optimizer, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def average_state(
    average: AveragedWeights | None, sharded: bool
) -> tuple[dict[str, Any] | None, dict[int, Tensor] | None]:
    """The average as replicated state, by parameter where nothing is sharded, and as this rank's shard, by its number."""
    if average is None:
        return None, None
    state = average.state_dict()
    names = [name for name, _, _ in state["pieces"]]
    whole = None if sharded else {names[number]: one for number, one in state["averages"].items()}
    return {"n_averaged": state["n_averaged"], "averages": whole}, state["averages"] if sharded else None


def _load_average(
    average: AveragedWeights, state: Mapping[str, Any] | None, parts: Sequence[Mapping[str, Any]] | None
) -> None:
    """Loads the average of a snapshot; without one it begins anew, with the next update. Collective."""
    if state is None:
        return
    if parts is None:
        whole = state["averages"]
        pieces = [(name, 0, one.numel()) for name, one in whole.items()]
        parts = [{"pieces": pieces, "averages": dict(enumerate(whole.values()))}]
    average.load_state_dict([{**part, "n_averaged": state["n_averaged"]} for part in parts])


# ------------------------------------------------------------------------------------ snapshots of later steps


def later_snapshots(folder: Path, step: int) -> list[Path]:
    """Snapshots in a folder of later steps than this."""
    return [path for path in list_snapshots(folder) if step_of(path) > step]


def remove_abandoned(abandoned: list[Path], written: Path, warn: Warn | None = None) -> None:
    """Removes later snapshots than the one a run has resumed from, now that it has written one of its own.

    Whenever the process is killed, there is a snapshot to resume from, and the newest is the old course's last or the new one,
    never one between: the new one is in place first; then the others lose their names, the oldest first; only then are their
    files removed, which may take long.

    Args:
        abandoned: the snapshots; empty when this returns.
        written: the new one, which may have the place of one of them.
        warn: takes a warning for each file that resists removal; by default it is a Python warning.
    """
    remove(sorted((path for path in abandoned if path != written), key=step_of), warn)
    abandoned.clear()
