"""Snapshots as tests write and forge them."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.writer import SnapshotWriter


def write(
    folder: Path,
    step: int = 1,
    replicated: Any = None,
    per_rank: Any = None,
    weights: dict[str, Any] | None = None,
) -> Path:
    """A snapshot of one rank, on the disk when this returns; raises SnapshotError where it cannot be written."""
    told: list[str] = []
    with SnapshotWriter(folder, 100, Participant(0, 1, "0123abcd"), told.append, blocking=True) as writer:
        writer.begin(step, weights=weights or {}, replicated=replicated, per_rank=per_rank)
        written = writer.wait()
    if written is None:
        raise SnapshotError(told[0])
    return written


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
