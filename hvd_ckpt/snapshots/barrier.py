"""File-system barrier of the ranks' threads that write a snapshot. They send no messages, since these would mix with those of
training.

Only rank 0 makes the temporary folder, so a late rank cannot create one that rank 0 has discarded. Each rank writes its
files, and then a rank manifest with their sizes and hashes, or with the reason for its failure. Rank 0 collects the rank manifests.

The waiting time of a rank is the sum of the pauses between its checks. So the time in which a job is suspended (SIGSTOP,
SIGCONT) does not count.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.snapshots.folder import name_of, names_in, temporary_name
from hvd_ckpt.snapshots.schema import FileEntry, Layout, Ranges, TensorMetadata, files_of
from hvd_ckpt.utils.plain_data import parse_json
from hvd_ckpt.utils.schema import Strict, Wrong

# That a rank waits for the folder, and rank 0, its own files written, for the others' files.
RANK_SECONDS = 120.0


@dataclass(frozen=True)
class Participant:
    """One of the ranks that write snapshots together.

    Attributes:
        rank, ranks: its number, and how many they are.
        token: 8 hexadecimal digits, the same on every rank, and new for each writer.
    """

    rank: int
    ranks: int
    token: str

    @property
    def leads(self) -> bool:
        """Whether it makes the folder, completes the snapshot, and removes it if that fails."""
        return self.rank == 0

    def temporary_name(self, step: int, number: int) -> str:
        """The name of the folder of the writer's snapshot of that number, while it is written."""
        # All ranks derive the same name without a message. Each snapshot has
        # a new one, so files of a failed one cannot get into the next.
        token = hashlib.sha256(f"{self.token} {number}".encode()).hexdigest()[:8]
        return temporary_name(name_of(step), token)


class RankManifest(Strict):
    """The files of a rank, or the reason for its failure in one line; only rank 0's has ``aliases`` of weights.

    ``tensors`` are those of which it has the first element; ``needed``: the bytes that it needs, if there is no room on the disk.
    """

    host: str
    files: dict[str, FileEntry] = Field(default_factory=dict)
    aliases: dict[str, str] = Field(default_factory=dict)
    layout: Layout = Field(default_factory=Layout)
    tensors: dict[str, TensorMetadata] = Field(default_factory=dict)
    ranges: Ranges = Field(default_factory=dict)
    fault: str = ""
    needed: int | None = None


def await_folder(temporary: Path) -> None:
    """Waits, on a rank other than 0, for the folder that rank 0 makes when it begins the snapshot.

    Raises:
        Wrong: it does not come.
    """
    for waited in _looks():
        # Listing the folder makes a network file system ask its server again.
        if temporary.is_dir() or temporary.name in names_in(temporary.parent):
            return
        if waited > RANK_SECONDS:
            raise Wrong(not_shared(f"'{temporary}', which rank 0 makes, is not there on host {host_name()}"))


def send(temporary: Path, rank: int, manifest: RankManifest) -> None:
    """Hands this rank's manifest to rank 0.

    Raises:
        OSError: one without a fault cannot be written.
    """
    place = temporary / _name(rank)
    complete = place.with_suffix(".new")
    try:
        if manifest.fault:
            # Makes room for the manifest, which may have failed for want of it.
            for name in files_of(rank):
                (temporary / name).unlink(missing_ok=True)
        complete.write_text(manifest.model_dump_json(exclude_none=True), encoding="utf-8")
        # Rank 0 looks for this name and must not read half a manifest.
        complete.rename(place)
    except OSError:
        with suppress(OSError):  # an empty one needs no room
            place.touch()
        if not manifest.fault:  # which is why
            raise


def collect(temporary: Path, ranks: int, given_up: Callable[[], bool]) -> list[RankManifest]:
    """Waits, on rank 0, for the manifests of all other ranks, and removes their files; in rank order.

    Args:
        given_up: returns whether this process ends, and will not wait any longer.

    Raises:
        Wrong: one does not come.
        OSError: the folder cannot be read.
    """
    manifests: dict[int, RankManifest] = {}
    missing = list(range(1, ranks))
    for waited in _looks():
        # One listing for all ranks, for which a network file system asks its server.
        names = set(os.listdir(temporary)) if missing else set()
        manifests.update({rank: _receive(temporary, rank) for rank in missing if _name(rank) in names})
        missing = [rank for rank in missing if rank not in manifests]
        if not missing:
            break
        if given_up():
            raise Wrong(
                f"rank {missing[0]} had not written its files when this process ended: look at its output"
            )
        if waited > RANK_SECONDS:
            raise Wrong(
                not_shared(f"rank {missing[0]} has not written its files for {RANK_SECONDS:g} seconds")
            )
    return [manifests[rank] for rank in sorted(manifests)]


def not_shared(what: str) -> str:
    """A sentence about ranks that see different folders, with the way out."""
    return f"{what}: name a folder on a file system that all hosts share"


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _receive(temporary: Path, rank: int) -> RankManifest:
    path = temporary / _name(rank)
    try:
        manifest = parse_json(RankManifest, path.read_bytes(), "write it again", "write it again")
        if not manifest.fault and sorted(manifest.files) != sorted(files_of(rank)):
            raise Wrong("it names other files")
    except Wrong:
        manifest = RankManifest(
            host="?", fault=f"it could not report what it has written to '{temporary}': make room there"
        )
    # Only the snapshot's own files may be in the folder when it gets its name: open_snapshot() refuses unknown ones.
    path.unlink()
    return manifest


def _looks() -> Iterator[float]:
    """Pauses between two looks, short at first; gives the seconds that were paused."""
    waited, pause = 0.0, 0.002
    while True:
        yield waited
        time.sleep(pause)
        waited, pause = waited + pause, min(1.5 * pause, 0.1)
