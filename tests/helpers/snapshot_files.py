"""Snapshots as tests write and forge them."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.folder import SnapshotError, name_of
from hvd_ckpt.snapshots.schema import Range, rank_file
from hvd_ckpt.snapshots.training_state import random_state
from hvd_ckpt.snapshots.writer import SnapshotWriter

SAMPLES = 40
CONFIG: dict[str, Any] = {
    "model": "gpt-tiny",
    "model_options": {"layers": 1},
    "steps": 4,
    "precision": "fp16",
    "budget": "0.5x",
}


def state_of(weights: dict[str, Any] | None, replicated: Any = None, per_rank: Any = None) -> SavedState:
    """What a rank saves that has these weights whole, of which tied ones have one memory."""
    tensors: dict[str, Range] = {}
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in (weights or {}).items():
        stored = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if stored != name:
            aliases[name] = stored
            continue
        is_buffer = not (tensor.requires_grad or name.endswith("weight")) and name.count("running")
        tensors[name] = Range.of(f"weights/{name}", tensor, bool(is_buffer))
    return SavedState(replicated, per_rank, list(tensors.values()), aliases)


def divided(ranges: Sequence[Range], place: int, ranks: int) -> list[Range]:
    """One rank's part of these ranges, an equal one of each."""
    own = []
    for each in ranges:
        first, last = (each.values.numel() * edge // ranks for edge in (place, place + 1))
        if first < last or (place == 0 and not each.values.numel()):
            start, stop = each.start + first, each.start + last
            own.append(each._replace(start=start, stop=stop, values=each.values[first:last]))
    return own


def model_and_optimizer(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def state_of_run() -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor], list[Range]]:
    """Replicated state, state of a rank, weights, and state of the optimizer, as a run has them."""
    from hvd_ckpt.app.training.config import Config
    from hvd_ckpt.app.training.resume import Progress

    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    ranges = [Range.of(f"buffers@0/{name}", buffer) for name, buffer in model.named_buffers()]
    state = {}
    for name, parameter in model.named_parameters():
        kept = state[name] = dict(optimizer.state[parameter])
        for key in ("exp_avg", "exp_avg_sq"):
            ranges.append(Range.of(f"optimizer.{key}/{name}", kept[key]))
            kept[key] = None
    replicated = {
        "config": Config.make(CONFIG).as_dict(),
        "steps": 4,
        "ranks": 1,
        "groups": [names],
        "options": [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}],
        "ema": None,
        "progress": Progress(step=2, position=8, best=1.5).model_dump(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "plan": '{"format": "hvd_ckpt plan"}\n',
        "samples": SAMPLES,
        "logged": [(3.5, 2.0)],
        "threads": 2,
        "device": "cpu",
        "replicas": None,
        "mid_period": False,
        "scheduler": None,
        "loop": {},
    }
    reduction = {
        "version": 2,
        "order": names[::-1],
        "sparse": {},
        "densified": {},
        "bucket_cap_bytes": float(25 << 20),
        "counts": dict.fromkeys(names, 1),
        "lower_counts": {},
    }
    per_rank = {
        "loader": None,
        "random": random_state(),
        "reduction": reduction,
        "optimizer": {"state": state, "others": {}, "more": {}},
        "local": None,
    }
    return replicated, per_rank, model.state_dict(), ranges


def read_snapshot(path: Path, rank: int | None = None) -> reader.Snapshot:
    """A snapshot of which this process has read all weights, and the plain values of its rank or another one."""
    snapshot = reader.open_snapshot(Path(path))
    if rank is not None:
        there = rank < snapshot.manifest.replicas
        vars(snapshot)["per_rank"] = snapshot.state(rank_file(snapshot.number_of(rank))) if there else None
    _ = snapshot.replicated, snapshot.per_rank, snapshot.weights
    return snapshot


def found_in(folder: Path) -> Path | None:
    """The path of the newest undamaged snapshot in a folder, if any."""
    found = reader.find(folder)
    return None if found is None else found.path


def digest_of(path: Path) -> str:
    """The SHA-256 of the weights in a snapshot."""
    digest = hashlib.sha256()
    for name, weight in sorted(read_snapshot(path, 0).weights.items()):
        digest.update(name.encode() + weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write(
    folder: Path,
    step: int = 1,
    replicated: Any = None,
    per_rank: Any = None,
    weights: dict[str, Any] | None = None,
    ranges: Sequence[Range] = (),
    blocking: bool = True,
) -> Path:
    """A snapshot of one rank, on the disk when this returns; raises SnapshotError where it cannot be written."""
    told: list[str] = []
    with SnapshotWriter(folder, 100, 0, 1, "0123abcd", told.append, blocking) as writer:
        state = state_of(weights, replicated, per_rank)
        state.ranges = [*state.ranges, *ranges]
        writer.begin(step, state)
        written = writer.wait()
    if written is None:
        raise SnapshotError(told[0])
    return written


def write_ranks(folder: Path, step: int, states: Sequence[SavedState]) -> Path:
    """A snapshot that the writers of several ranks write together."""
    writers = [
        SnapshotWriter(folder, 9, rank, len(states), "0" * 8, pytest.fail) for rank in range(len(states))
    ]
    for writer, state in zip(writers, states):
        writer.begin(step, state)
    for writer in writers:
        writer.close()
    return folder / name_of(step)


def save(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    """Saves step 1 of a loop, after it has resumed if it can."""
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True, **more) as snapshots:
        snapshots.resume()
        snapshots.save(1)


def resume(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    """Resumes a loop from its step 1."""
    with hc.Snapshots(folder, model=model, optimizer=optimizer, **more) as snapshots:
        assert snapshots.resume() == 1


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Lets files grow no larger than this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def opened_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often this process opens files inside, by their names, to verify and read them."""
    counts: Counter[str] = Counter()
    unspied = os.open

    def spying(path: Any, *arguments: Any, **options: Any) -> int:
        counts[os.path.basename(os.fsdecode(path))] += 1
        return unspied(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", spying)
        yield counts


def sign(path: Path, **changes: Any) -> None:
    """Makes the manifest fit the files and the changes, as somebody who means harm would."""
    document = json.loads((path / "manifest.json").read_bytes()) | changes
    document.pop("sha256", None)
    for name, entry in document["files"].items() if isinstance(document.get("files"), dict) else ():
        file = path / name
        if isinstance(entry, dict) and file.is_file() and not file.is_symlink():
            entry.update(bytes=file.stat().st_size)
            if entry["bytes"] < 1 << 22:
                entry.update(sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(document))
