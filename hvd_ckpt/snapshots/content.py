"""The content of a snapshot: what each rank saves and writes, and how rank 0 completes it.

The ranks' threads meet in the file system. They send no messages, since these would mix with those of training. Only rank 0 makes
the temporary folder, so a late rank cannot create one that rank 0 has discarded. Each rank writes its files, and then a rank
manifest with their sizes and hashes, or with the reason for its failure. Rank 0 collects the rank manifests.

The waiting time of a rank is the sum of the pauses between its checks. So the time in which a job is suspended (SIGSTOP,
SIGCONT) does not count.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from torch import Tensor

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.snapshots.folder import Warn, name_of, names_in, put_in_place, reason_of, sync_folder
from hvd_ckpt.snapshots.schema import (
    MANIFEST,
    REPLICATED,
    FileEntry,
    Layout,
    Manifest,
    Range,
    Ranges,
    TensorMetadata,
    files_of,
    libraries,
    rank_file,
    tensors_file,
)
from hvd_ckpt.snapshots.tensors import Staging, map_tensors, save_bytes, save_state, save_tensors, stored
from hvd_ckpt.utils.plain_data import parse_json
from hvd_ckpt.utils.schema import Strict, Wrong, first_error
from hvd_ckpt.utils.torch_private import pytree

SMALL = 4096  # bytes of a tensor that is not worth leaving to the thread
# That a rank waits for the folder, and rank 0, its own files written, for the others' files.
RANK_SECONDS = 120.0


@dataclass
class SavedState:
    """What a rank saves.

    Attributes:
        replicated: plain values that are the same on every rank; rank 0's are written.
        per_rank: plain values of this rank.
        ranges: the elements of tensors that this rank writes.
        aliases: further names of tied weights, and the names that they are stored under.
        layout: how the ranks share the model.
    """

    replicated: Any
    per_rank: Any
    ranges: Sequence[Range] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        plain = pytree.tree_leaves((self.replicated, self.per_rank))
        tensors = (*(each.values for each in self.ranges), *plain)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


class RankManifest(Strict):
    """The files of a rank, or the reason for its failure in one line.

    ``tensors`` are those of which it has the first element; ``needed``: the bytes that it needs, if there is no room on the disk.
    """

    host: str = Field(default_factory=host_name)
    files: dict[str, FileEntry] = Field(default_factory=dict)
    tensors: dict[str, TensorMetadata] = Field(default_factory=dict)
    ranges: Ranges = Field(default_factory=dict)
    fault: str = ""
    needed: int | None = None


def staged(rank: int, staging: Staging | None, state: SavedState) -> SavedState:
    """The state with copies in place of tensors, which ``staging`` makes, if given: those of plain values, and of ranges that may
    change at once, before this returns. Raises Wrong if the state holds something that files do not, or there is no memory for the
    copies."""

    def copy_of(tensor: Tensor, at_once: bool = True) -> Tensor:
        return tensor if staging is None else staging.copy_of(tensor, at_once)

    def plain(value: Any, place: str) -> Any:
        return map_tensors(value, place, lambda tensor: copy_of(stored(tensor).detach()))

    if staging is not None:
        staging.restart()
    own = plain(state.per_rank, "per_rank")
    replicated, ranges = plain(state.replicated, "replicated") if rank == 0 else None, list[Range]()
    for each in state.ranges:
        if not each.name.isprintable():
            raise Wrong(f"a tensor has the name {ascii(each.name)[:60]}: give printable texts as names")
        at_once = each.changing or each.values.nbytes <= SMALL
        ranges.append(each._replace(values=copy_of(each.values, at_once)))
    if staging is not None:
        staging.start()
    return dataclasses.replace(state, replicated=replicated, per_rank=own, ranges=ranges)


def write_content(temporary: Path, rank: int, state: SavedState) -> RankManifest:
    """Writes a rank's files, which are on the disk when this returns."""
    files = {rank_file(rank): save_state(temporary / rank_file(rank), state.per_rank)}
    if rank == 0:
        files[REPLICATED] = save_state(temporary / REPLICATED, state.replicated)
    tensors = {each.name: each.values for each in state.ranges if each.start < each.stop}
    files[tensors_file(rank)] = save_tensors(temporary / tensors_file(rank), tensors)
    return RankManifest(
        files=files,
        # Once for all ranks: rank 0 would read it of each.
        tensors={each.name: each.whole for each in state.ranges if each.start == 0},
        ranges={each.name: (each.start, each.stop) for each in state.ranges if each.start < each.stop},
    )


# ------------------------------------------------------------------------------------ between ranks


def await_folder(temporary: Path, given_up: Callable[[], bool]) -> None:
    """Waits, on a rank other than 0, for the folder that rank 0 makes when it begins the snapshot. Raises Wrong if it does not
    come, also when ``given_up`` returns that rank 0 has failed."""
    for waited in _looks():
        # Listing the folder makes a network file system ask its server again.
        if temporary.is_dir() or temporary.name in names_in(temporary.parent):
            return
        if given_up():
            raise Wrong("rank 0 has failed")
        if waited > RANK_SECONDS:
            raise _not_shared(f"'{temporary}', which rank 0 makes, is not there on host {host_name()}")


def send(temporary: Path, rank: int, manifest: RankManifest) -> None:
    """Hands this rank's manifest to rank 0. Raises OSError if one without a fault cannot be written."""
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
    """Waits, on rank 0, for the manifests of all other ranks, and removes their files; in rank order. Raises Wrong if one does not
    come, also when ``given_up`` returns that this process ends."""
    manifests: dict[int, RankManifest] = {}
    for waited in _looks():
        # One listing for all ranks, for which a network file system asks its server.
        names = set(os.listdir(temporary)) if ranks > 1 else set()
        missing = [rank for rank in range(1, ranks) if rank not in manifests]
        manifests.update({rank: _receive(temporary, rank) for rank in missing if _name(rank) in names})
        missing = [rank for rank in missing if rank not in manifests]
        if not missing:
            break
        if given_up():
            raise Wrong(
                f"rank {missing[0]} had not written its files when this process ended: look at its output"
            )
        if waited > RANK_SECONDS:
            raise _not_shared(f"rank {missing[0]} has not written its files for {RANK_SECONDS:g} seconds")
    return [manifests[rank] for rank in sorted(manifests)]


def _receive(temporary: Path, rank: int) -> RankManifest:
    path = temporary / _name(rank)
    try:
        manifest = parse_json(RankManifest, path.read_bytes(), "write it again", "write it again")
    except Wrong:
        manifest = RankManifest(
            host="?", fault=f"it could not report what it has written to '{temporary}': make room there"
        )
    # Only the snapshot's own files may be in the folder when it gets its name: open_snapshot() refuses unknown ones.
    path.unlink()
    return manifest


def complete(
    temporary: Path, step: int, state: SavedState, ranks: Sequence[RankManifest], warn: Warn
) -> None:
    """Completes a snapshot, on rank 0, which has saved ``state``, of the manifests of all ranks, in their order. Warns if an older
    snapshot of the step cannot be removed. Raises Wrong if a rank has failed, this one included, or the ranks' files do not fit
    each other."""
    for rank, manifest in enumerate(ranks):
        if manifest.fault:
            raise Wrong(f"rank {rank}: {manifest.fault}")
    try:
        for rank, manifest in enumerate(ranks):
            for name, entry in manifest.files.items():
                path = temporary / name
                # Also a check that all ranks write to one file system: on another host, the same path may be a folder of its own.
                if not path.is_file() or path.stat().st_size != entry.bytes:
                    seen = f"rank 0 on host {ranks[0].host} does not see it"
                    raise _not_shared(f"rank {rank} on host {manifest.host} wrote '{path}', and {seen}")
        whole = Manifest(
            format="hvd_ckpt snapshot",
            version=3,
            step=step,
            ranks=len(ranks),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            libraries=libraries(),
            layout=state.layout,
            files=dict(sorted(item for manifest in ranks for item in manifest.files.items())),
            ranges=tuple(manifest.ranges for manifest in ranks),
            tensors=dict(item for manifest in ranks for item in manifest.tensors.items()),
            aliases=dict(state.aliases),
        )
        save_bytes(temporary / MANIFEST, whole.encode())
        # Names first, then the rename: after a power failure there must be no snapshot by name that lacks a file.
        sync_folder(temporary)
        put_in_place(temporary, temporary.parent / name_of(step), warn)
    except ValidationError as error:
        raise Wrong(f"the ranks' files do not fit each other: {first_error(error)}") from None
    except OSError as error:
        raise Wrong(f"rank 0: {reason_of(error)}") from None


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _not_shared(what: str) -> Wrong:
    """The error of ranks that see different folders, with the way out."""
    return Wrong(f"{what}: name a folder on a file system that all hosts share")


def _looks() -> Iterator[float]:
    """Pauses between two looks, short at first; gives the seconds that were paused."""
    waited, pause = 0.0, 0.002
    while True:
        yield waited
        time.sleep(pause)
        waited, pause = waited + pause, min(1.5 * pause, 0.1)
