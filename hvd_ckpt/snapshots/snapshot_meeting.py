"""How the ranks' threads meet in the file system while a snapshot is written: they send no messages.

Rank 0 makes the temporary folder; no other rank ever makes it, so that one which comes late cannot bring back what rank 0 has given
up. Each rank writes its files, and last a ``.part`` with their sizes and checksums, or with a fault. Rank 0 collects these.

Seconds of waiting are those between looks, so that a job that is suspended and continued (SIGSTOP, SIGCONT) has lost none.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hvd_ckpt.json_file import Wrong, dumps, read_json
from hvd_ckpt.peers import host_name
from hvd_ckpt.snapshots.hashed_file import FileFacts
from hvd_ckpt.snapshots.manifest import files_of, own_name
from hvd_ckpt.snapshots.snapshot_folder import names_in
from hvd_ckpt.snapshots.snapshot_parts import Part, Split, not_shared, reason_of

__all__ = ["await_folder", "parts_of_others", "send_part"]

PART_SECONDS = 120.0  # that rank 0, its own part written, waits for the others', and these for the folder
LATE_SECONDS = 20.0  # that a rank waits for the folder when its caller waits for it
BUSY_SECONDS = 600.0  # that a rank waits while nothing changes in the folder before, which rank 0 still has


def await_folder(temporary: Path, before: Path | None, hurried: Callable[[], bool]) -> None:
    """Waits, on a rank other than 0, for the folder that rank 0 makes. The time begins when rank 0 is done with the one before.

    Args:
        temporary: the folder.
        before: the temporary folder of the snapshot before.
        hurried: says whether training itself waits: then rank 0 has had its time, and it is not waited for long.

    Raises:
        Wrong: it does not come.
    """
    folder = temporary.parent
    waited = late = unchanged = 0.0
    seen: object = None
    for pause in _pauses():
        if temporary.is_dir():
            return
        # Listing the folder has a network file system ask its server again.
        names = names_in(folder)
        if temporary.name in names:
            return
        if folder.is_dir() and not os.access(folder, os.W_OK):
            raise Wrong(f"'{folder}' cannot be written to: name a folder that can be")
        if before is not None and before.name in names:
            looked = _look_of(before)
            unchanged = unchanged + pause if looked == seen else 0.0
            seen = looked
        else:
            waited += pause
            late += pause if hurried() else 0.0
        if late > LATE_SECONDS or waited > PART_SECONDS or unchanged > BUSY_SECONDS:
            raise Wrong(not_shared(f"'{temporary}', which rank 0 makes, is not there on host {host_name()}"))
        time.sleep(pause)


def send_part(temporary: Path, rank: int, part: Part) -> str | None:
    """Tells rank 0 of this rank's part; returns the part's fault."""
    place = temporary / _part_name(rank)
    whole = place.with_suffix(".new")
    try:
        if part.fault:
            for name in files_of(rank, True, True):
                (temporary / name).unlink(missing_ok=True)
        whole.write_text(dumps(dataclasses.asdict(part)), encoding="utf-8")
        whole.rename(place)
    except OSError as error:
        with suppress(OSError):  # an empty one needs no room
            place.touch()
        return part.fault or reason_of(error)
    return part.fault or None


def parts_of_others(temporary: Path, ranks: int, given_up: Callable[[], bool]) -> list[Part]:
    """Waits, on rank 0, for the parts of all other ranks, and removes what they were told by; in rank order.

    Args:
        given_up: says whether this process ends, and will not wait any longer.

    Raises:
        Wrong: one does not come.
        OSError: the folder cannot be read.
    """
    parts: dict[int, Part] = {}
    missing = list(range(1, ranks))
    waited = 0.0
    for pause in _pauses():
        names = set(os.listdir(temporary)) if missing else set()
        for rank in missing:
            if _part_name(rank) in names:
                parts[rank] = _received(temporary, rank)
        missing = [rank for rank in missing if rank not in parts]
        if not missing:
            break
        waited += pause
        if given_up():
            raise Wrong(
                f"rank {missing[0]} had not written its part when this process ended: look at its output"
            )
        if waited > PART_SECONDS:
            raise Wrong(
                not_shared(f"rank {missing[0]} has not written its part for {PART_SECONDS:g} seconds")
            )
        time.sleep(pause)
    return [parts[rank] for rank in sorted(parts)]


def _part_name(rank: int) -> str:
    return f"{own_name(rank)}.part"


def _received(temporary: Path, rank: int) -> Part:
    """What a rank has told of its part, which is removed."""
    path = temporary / _part_name(rank)
    try:
        told = read_json(path, "write it again", "write it again")
        files = {name: FileFacts(**facts) for name, facts in told["files"].items()}
        split = None if told["split"] is None else Split(**told["split"])
        part = Part(**{**told, "files": files, "split": split})
        weights = split is not None and split.ranges["weights"] is not None
        if not part.fault and sorted(part.files) != files_of(rank, split is not None, weights):
            raise Wrong("it names other files")
    except (Wrong, TypeError, KeyError, AttributeError):
        part = Part("?", fault=f"it could not say what it has written to '{temporary}': make room there")
    path.unlink()
    return part


def _look_of(folder: Path) -> object:
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
