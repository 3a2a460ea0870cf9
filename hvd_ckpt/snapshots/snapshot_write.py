"""Writing a snapshot on all ranks at once, so that it is there whole or not at all, and fails on all or on none.

Ranks write into a temporary folder that rank 0 makes and, when all of it is on the disk, renames. No rank raises before all have
told how they fared: each brings its files' sizes and checksums, or what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set
from torch import Tensor

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.peers import host_name
from hvd_ckpt.reduction.agreement import allgather_objects, broadcast_from
from hvd_ckpt.snapshots.hashed_file import SnapshotError
from hvd_ckpt.snapshots.shards import OwnShard
from hvd_ckpt.snapshots.snapshot_folder import discard, name_of, temporary_name, under_way
from hvd_ckpt.snapshots.snapshot_parts import (
    Content,
    Part,
    check_step,
    content_of,
    finish,
    make_temporary,
    not_shared,
    reason_of,
    write_content,
)

__all__ = ["rank_and_size", "write"]


def write(
    folder: Path,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    common: Any,
    own: Any,
    shard: OwnShard | None = None,
) -> Path:
    """Writes a snapshot; it is on the disk, whole, when this returns. Collective where Horovod runs with several ranks.

    ``common`` and ``own`` are trees of dict, list, tuple, str, int, float, bool, None, bytes and tensors.

    Args:
        folder: where snapshots are, such as RUN/snapshots; made if missing; all ranks must see the same one.
        step: training steps taken.
        weights: ``model.state_dict()``; rank 0's are written.
        common: what is the same on every rank; rank 0's is written.
        own: what is this rank's own.
        shard: this rank's part of what is split over the ranks; None where nothing is.

    Returns:
        The snapshot's folder.

    Raises:
        SnapshotError: on every rank, if any cannot write its part; what was there before is untouched.
    """
    rank, _ = rank_and_size()
    begun = _from_rank_0(_begin(Path(folder), step) if rank == 0 else None, "begin")
    if begun.fault:
        raise SnapshotError(f"The snapshot was not written to '{folder}': rank 0: {begun.fault}.")
    temporary = Path(folder) / begun.name
    with under_way(temporary):
        try:
            encode = partial(content_of, rank, weights, common, own, shard)
            part = _write_part(temporary, begun.step, step, encode)
            parts = _gathered(part, "parts")
            fault = _from_rank_0(finish(temporary, step, parts) if rank == 0 else None, "end")
        except BaseException:
            if rank == 0:
                discard(temporary)
            raise
    if fault is not None:
        raise SnapshotError(f"The snapshot of step {begun.step} was not written to '{folder}': {fault}.")
    return Path(folder) / name_of(step)


@dataclass(frozen=True)
class _Begun:
    """What rank 0 tells the others before they write: the step, and the name of the temporary folder or a fault."""

    step: Any
    name: str = ""
    fault: str = ""


def _begin(folder: Path, step: Any) -> _Begun:
    try:
        check_step(step)
        name = temporary_name(name_of(step))
        make_temporary(folder / name)
        return _Begun(step, name)
    except Exception as error:  # the other ranks wait for an answer
        return _Begun(None, fault=reason_of(error))


def _write_part(temporary: Path, step: int, step_here: Any, encode: Callable[[], Content]) -> Part:
    host = host_name()
    try:
        if step_here != step:
            raise Wrong(f"step is {step_here!r} here and {step} on rank 0: write the same step on every rank")
        if not temporary.is_dir():
            raise Wrong(not_shared(f"'{temporary}', which rank 0 made, is not there on host {host}"))
        return write_content(temporary, encode())
    except Exception as error:  # the other ranks wait for an answer
        return Part(host, fault=reason_of(error))


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; one where Horovod does not run."""
    return (hvd.rank(), hvd.size()) if hvd.is_initialized() else (0, 1)


def _from_rank_0(value: Any, name: str) -> Any:
    if rank_and_size()[1] == 1:
        return value
    return broadcast_from(value, 0, global_process_set, f"hvd_ckpt.snapshot.{name}")


def _gathered(value: Any, name: str) -> list[Any]:
    if rank_and_size()[1] == 1:
        return [value]
    return allgather_objects(value, global_process_set, f"hvd_ckpt.snapshot.{name}")
