"""Ranks' threads meet in the file system while a snapshot is written: they send no messages, which would mix with training's.

Rank 0 makes the temporary folder; no other rank ever makes it, so that one which comes late cannot bring back what rank 0 has given
up. Each rank writes its files, and last a rank manifest with their sizes and hashes, or with the reason why there are none. Rank 0
collects the rank manifests.

Seconds of waiting are the sum of pauses between two looks, so a job that is suspended and continued (SIGSTOP, SIGCONT) loses none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from hvd_ckpt.hosts import host_name
from hvd_ckpt.json_file import Wrong
from hvd_ckpt.schema import Strict, parse_json
from hvd_ckpt.snapshots.folder import names_in, reason_of
from hvd_ckpt.snapshots.schema import FileEntry, files_of
from hvd_ckpt.snapshots.shards import RankShards

__all__ = ["RankManifest", "await_folder", "collect", "not_shared", "send"]

RANK_SECONDS = 120.0  # that rank 0, its own files written, waits for the others', and these for the folder
LATE_SECONDS = 20.0  # that a rank waits for the folder when training waits for the rank
BUSY_SECONDS = 600.0  # that a rank waits while nothing changes in the folder before, which rank 0 still has


class RankManifest(Strict):
    """What a rank has written, or in one line why it has not; only rank 0's has ``aliases`` of weights."""

    host: str
    files: dict[str, FileEntry] = Field(default_factory=dict)
    aliases: dict[str, str] = Field(default_factory=dict)
    shards: RankShards | None = None
    fault: str = ""


def await_folder(temporary: Path, before: Path | None, hurried: Callable[[], bool]) -> None:
    """Waits, on a rank other than 0, for the folder that rank 0 makes. The time begins when rank 0 is done with the one before.

    Args:
        temporary: the folder.
        before: the temporary folder of the snapshot before.
        hurried: returns whether training itself waits: then rank 0 has had its time, and it is not waited for long.

    Raises:
        Wrong: it does not come.
    """
    folder = temporary.parent
    waited = late = unchanged = 0.0
    seen: object = None
    for pause in _pauses():
        if temporary.is_dir():
            return
        # Listing the folder makes a network file system ask its server again.
        names = names_in(folder)
        if temporary.name in names:
            return
        if folder.is_dir() and not os.access(folder, os.W_OK):
            raise Wrong(f"'{folder}' cannot be written to: name a folder that can be")
        if before is not None and before.name in names:
            found = _activity(before)
            unchanged = unchanged + pause if found == seen else 0.0
            seen = found
        else:
            waited += pause
            late += pause if hurried() else 0.0
        if late > LATE_SECONDS or waited > RANK_SECONDS or unchanged > BUSY_SECONDS:
            raise Wrong(not_shared(f"'{temporary}', which rank 0 makes, is not there on host {host_name()}"))
        time.sleep(pause)


def send(temporary: Path, rank: int, manifest: RankManifest) -> str | None:
    """Hands this rank's manifest to rank 0; returns why the snapshot fails, if it does."""
    place = temporary / _name(rank)
    complete = place.with_suffix(".new")
    try:
        if manifest.fault:
            for name in files_of(rank, True, True):
                (temporary / name).unlink(missing_ok=True)
        complete.write_text(manifest.model_dump_json(), encoding="utf-8")
        complete.rename(place)
    except OSError as error:
        with suppress(OSError):  # an empty one needs no room
            place.touch()
        return manifest.fault or reason_of(error)
    return manifest.fault or None


def collect(temporary: Path, ranks: int, given_up: Callable[[], bool]) -> list[RankManifest]:
    """Waits, on rank 0, for the manifests of all other ranks, and removes their files; in rank order.

    Args:
        given_up: returns whether this process ends, and will not wait any longer.

    Raises:
        Wrong: one does not come.
        OSError: the folder cannot be read.
    """
    found: dict[int, RankManifest] = {}
    missing = list(range(1, ranks))
    waited = 0.0
    for pause in _pauses():
        names = set(os.listdir(temporary)) if missing else set()
        found.update({rank: _receive(temporary, rank) for rank in missing if _name(rank) in names})
        missing = [rank for rank in missing if rank not in found]
        if not missing:
            break
        waited += pause
        if given_up():
            raise Wrong(
                f"rank {missing[0]} had not written its files when this process ended: look at its output"
            )
        if waited > RANK_SECONDS:
            raise Wrong(
                not_shared(f"rank {missing[0]} has not written its files for {RANK_SECONDS:g} seconds")
            )
        time.sleep(pause)
    return [found[rank] for rank in sorted(found)]


def not_shared(what: str) -> str:
    """A sentence about ranks that see different folders, with the way out."""
    return f"{what}: name a folder on a file system that all hosts share"


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _receive(temporary: Path, rank: int) -> RankManifest:
    path = temporary / _name(rank)
    try:
        manifest = parse_json(RankManifest, path.read_bytes(), "write it again", "write it again")
        shards = manifest.shards
        expected = files_of(rank, shards is not None, shards is not None and shards.weights is not None)
        if not manifest.fault and sorted(manifest.files) != sorted(expected):
            raise Wrong("it names other files")
    except Wrong:
        manifest = RankManifest(
            host="?", fault=f"it could not report what it has written to '{temporary}': make room there"
        )
    path.unlink()
    return manifest


def _activity(folder: Path) -> object:
    """Something that changes when a file in the folder comes or goes, or one of those that only rank 0 writes grows."""
    sizes = {}
    with suppress(OSError):
        for name in os.listdir(folder):
            sizes[name] = 0 if name.startswith("rank-") else (folder / name).stat().st_size
    return sizes


def _pauses() -> Iterable[float]:
    """Seconds between one look and the next: short at first."""
    pause = 0.002
    while True:
        yield pause
        pause = min(1.5 * pause, 0.1)
