"""The content of a snapshot: what a rank saves, copied to host memory, written, and completed by rank 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.snapshots.barrier import RankManifest, not_shared
from hvd_ckpt.snapshots.folder import Warn, name_of, put_in_place, reason_of, sync_folder
from hvd_ckpt.snapshots.schema import MANIFEST, REPLICATED, Layout, Manifest, Range, rank_file, tensors_file
from hvd_ckpt.snapshots.tensors import Staging, map_tensors, save_bytes, save_state, save_tensors, stored
from hvd_ckpt.utils.schema import Wrong, first_error
from hvd_ckpt.utils.torch_private import pytree

SMALL = 4096  # bytes of a tensor that is not worth leaving to the thread


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


def staged(rank: int, staging: Staging | None, state: SavedState) -> SavedState:
    """The state with copies in place of tensors, which ``staging`` makes: of those that may change at once before this returns.

    Args:
        staging: None to copy nothing.

    Raises:
        Wrong: the state holds something that files do not, or there is no memory for the copies.
    """

    def copy_of(tensor: Tensor, at_once: bool = False) -> Tensor:
        return tensor if staging is None else staging.copy_of(tensor, at_once or tensor.nbytes <= SMALL)

    if staging is not None:
        staging.restart()
    own = map_tensors(state.per_rank, "per_rank", lambda one: copy_of(stored(one).detach(), True))
    replicated, ranges = None, list[Range]()
    if rank == 0:
        replicated = map_tensors(state.replicated, "replicated", lambda one: copy_of(stored(one).detach()))
    for each in state.ranges:
        if not each.name.isprintable():
            raise Wrong(f"a tensor has the name {ascii(each.name)[:60]}: give printable texts as names")
        ranges.append(each._replace(values=copy_of(each.values, each.changing)))
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
        host=host_name(),
        files=files,
        aliases=dict(state.aliases) if rank == 0 else {},
        layout=state.layout,
        # Once for all ranks: rank 0 would read it of each.
        tensors={each.name: each.whole for each in state.ranges if each.start == 0},
        ranges={each.name: (each.start, each.stop) for each in state.ranges if each.start < each.stop},
    )


def complete(temporary: Path, step: int, ranks: Sequence[RankManifest], warn: Warn) -> None:
    """Completes a snapshot, on rank 0.

    Args:
        ranks: the manifests of all ranks, in their order.
        warn: called with the reason if an older snapshot of the step cannot be removed.

    Raises:
        Wrong: a rank has failed, this one included, or the ranks' files do not fit each other.
    """
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
                    raise Wrong(not_shared(f"rank {rank} on host {manifest.host} wrote '{path}', and {seen}"))
        whole = Manifest.now(
            step=step,
            ranks=len(ranks),
            layout=ranks[0].layout,
            files=dict(sorted(item for manifest in ranks for item in manifest.files.items())),
            ranges=tuple(manifest.ranges for manifest in ranks),
            tensors=dict(item for manifest in ranks for item in manifest.tensors.items()),
            aliases=ranks[0].aliases,
        )
        save_bytes(temporary / MANIFEST, whole.encode())
        # Names first, then the rename: after a power failure there must be no snapshot by name that lacks a file.
        sync_folder(temporary)
        put_in_place(temporary, temporary.parent / name_of(step), warn)
    except ValidationError as error:
        raise Wrong(f"the ranks' files do not fit each other: {first_error(error)}") from None
    except OSError as error:
        raise Wrong(f"rank 0: {reason_of(error)}") from None
