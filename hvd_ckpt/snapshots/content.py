"""The content of a snapshot: what a rank saves, staged in host memory, written, and completed by rank 0.

:func:`staged_content` makes a :class:`Content` (copies, by file) of a :class:`SavedState`. :func:`write_content` returns the
manifest of the rank, and :func:`complete` that of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.snapshots.barrier import RankManifest, not_shared
from hvd_ckpt.snapshots.folder import Warn, discard, name_of, put_in_place, reason_of, sync_folder
from hvd_ckpt.snapshots.ranges import Range
from hvd_ckpt.snapshots.schema import (
    MANIFEST,
    REPLICATED,
    FileEntry,
    Layout,
    Manifest,
    TensorMetadata,
    rank_file,
    tensors_file,
)
from hvd_ckpt.snapshots.tensors import (
    AsyncCopy,
    Staging,
    check_tensor,
    map_tensors,
    save_bytes,
    save_state,
    save_tensors,
)
from hvd_ckpt.utils.schema import Wrong, first_error

SMALL = 4096  # bytes of a tensor that is not worth leaving to the thread


@dataclass
class SavedState:
    """What a rank saves; nothing is copied yet.

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


@dataclass
class Content:
    """The files that a rank writes.

    Attributes:
        states: state dicts by file name.
        tensors: tensors by name.
        manifest: what the manifest of the rank says besides its files.
        copying: copies the tensors into those of ``states`` and ``tensors``; None where these are the tensors themselves.
    """

    states: dict[str, Any]
    tensors: dict[str, Tensor]
    manifest: Mapping[str, Any]
    copying: AsyncCopy | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        sizes: list[int] = []
        for state in (*self.states.values(), self.tensors):
            map_tensors(state, "state", lambda tensor, _: sizes.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
        return sum(sizes)


def staged_content(rank: int, staging: Staging | None, state: SavedState) -> Content:
    """The files that a rank writes, with copies in place of tensors. Tensors that may change at once are copied here.

    Args:
        staging: memory for the copies; None to copy nothing.

    Raises:
        Wrong: the state holds something that files do not, or there is no memory for the copies.
    """
    now: list[tuple[Tensor, Tensor]] = []
    later: list[tuple[Tensor, Tensor]] = []

    def staged(tensor: Tensor, place: str, at_once: bool = False) -> Tensor:
        check_tensor(tensor, place)
        tensor = tensor.detach()
        if staging is None:
            return tensor
        copy = staging.copy_of(tensor)
        (now if at_once or tensor.nbytes <= SMALL else later).append((tensor, copy))
        return copy

    if staging is not None:
        staging.restart()
    own = map_tensors(state.per_rank, "per_rank", lambda tensor, place: staged(tensor, place, True))
    states = {rank_file(rank): own}
    if rank == 0:
        states[REPLICATED] = map_tensors(state.replicated, "replicated", staged)
    tensors, metadata, ranges = {}, {}, {}
    for each in state.ranges:
        if not each.name.isprintable():
            raise Wrong(f"a tensor has the name {ascii(each.name)[:60]}: give printable texts as names")
        if each.start == 0:  # once for all ranks: rank 0 would read it of each
            metadata[each.name] = each.whole
        if each.start < each.stop:
            tensors[each.name] = staged(each.values, each.name, each.changing)
            ranges[each.name] = (each.start, each.stop)
    aliases = dict(state.aliases) if rank == 0 else {}
    manifest = {"aliases": aliases, "layout": state.layout, "tensors": metadata, "ranges": ranges}
    # The loop goes on when this returns. What is in `now` may change at once; `later` is copied before the next update.
    copying = None if staging is None else AsyncCopy(now, later)
    return Content(states, tensors, manifest, copying)


def write_content(temporary: Path, rank: int, content: Content) -> RankManifest:
    """Writes a rank's files, which are on the disk when this returns."""
    files: dict[str, FileEntry] = {}
    for name, state in content.states.items():
        files[name] = save_state(temporary / name, state)
    files[tensors_file(rank)] = save_tensors(temporary / tensors_file(rank), content.tensors)
    return RankManifest(host=host_name(), files=files, **content.manifest)


def complete(temporary: Path, step: int, ranks: Sequence[RankManifest], warn: Warn) -> str | None:
    """Completes a snapshot, on rank 0, or removes it; returns why it failed.

    Args:
        ranks: the manifests of all ranks, in their order.
        warn: called with the reason if an older snapshot of the step cannot be removed.
    """
    try:
        for rank, manifest in enumerate(ranks):
            if manifest.fault:
                raise Wrong(f"rank {rank}: {manifest.fault}")
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorMetadata] = {}
        for rank, manifest in enumerate(ranks):
            if manifest.layout != ranks[0].layout:
                raise Wrong("ranks shard different things: give every rank the same settings")
            for name, entry in manifest.files.items():
                path = temporary / name
                # Also a check that all ranks write to one file system: on another host, the same path may be a folder of its own.
                if not path.is_file() or path.stat().st_size != entry.bytes:
                    seen = f"rank 0 on host {ranks[0].host} does not see it"
                    raise Wrong(not_shared(f"rank {rank} on host {manifest.host} wrote '{path}', and {seen}"))
            files.update(manifest.files)
            tensors.update(manifest.tensors)
        whole = Manifest.now(
            step=step,
            ranks=len(ranks),
            layout=ranks[0].layout,
            files=dict(sorted(files.items())),
            ranges=tuple(manifest.ranges for manifest in ranks),
            tensors=tensors,
            aliases=ranks[0].aliases,
        )
        save_bytes(temporary / MANIFEST, whole.encode())
        # Names first, then the rename: after a power failure there must be no snapshot by name that lacks a file.
        sync_folder(temporary)
        put_in_place(temporary, temporary.parent / name_of(step), warn)
        return None
    except Exception as error:  # the other ranks wait for an answer
        discard(temporary)
        if isinstance(error, ValidationError):
            return f"the ranks' files do not fit each other: {first_error(error)}"
        return str(error) if isinstance(error, Wrong) else f"rank 0: {reason_of(error)}"
