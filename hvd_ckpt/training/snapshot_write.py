"""Writing a snapshot on all ranks at once, so that it is there whole or not at all, and fails on all or on none.

Ranks write into a temporary folder that rank 0 makes and, when all of it is on the disk, renames. No rank raises before all have
told how they fared: each brings its files' sizes and checksums, or what went wrong.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set
from torch import Tensor

from hvd_ckpt.json_file import MAX_BYTES, Wrong, dumps
from hvd_ckpt.reduction.agreement import allgather_objects, broadcast_from
from hvd_ckpt.training.hashed_file import FileFacts, SnapshotError, writing
from hvd_ckpt.training.manifest import COMMON, MANIFEST, MAX_STEP, MODEL, new_manifest, own_name, text_of
from hvd_ckpt.training.snapshot_folder import make_folder, name_of, put_in_place, sync_folder, temporary_name
from hvd_ckpt.training.tensor_file import check_tensor, write_tensors
from hvd_ckpt.training.tree import encode

__all__ = ["TOO_LARGE", "rank_and_size", "under_way", "write"]

TOO_LARGE = f"is more than {MAX_BYTES >> 20} MiB of JSON: put what is large into tensors"

under_way: set[Path] = set()  # temporary folders that this process writes to


def write(folder: Path, step: int, *, weights: Mapping[str, Tensor], common: Any, own: Any) -> Path:
    """Writes a snapshot; it is on the disk, whole, when this returns. Collective where Horovod runs with several ranks.

    ``common`` and ``own`` are trees of dict, list, tuple, str, int, float, bool, None, bytes and tensors.

    Args:
        folder: where snapshots are, such as RUN/snapshots; made if missing; all ranks must see the same one.
        step: training steps taken.
        weights: ``model.state_dict()``; rank 0's are written.
        common: what is the same on every rank; rank 0's is written.
        own: what is this rank's own.

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
    under_way.add(temporary)
    try:
        part = _write_part(temporary, begun.step, step, rank, weights, common, own)
        parts = _gathered(part, "parts")
        fault = _from_rank_0(_finish(temporary, step, parts) if rank == 0 else None, "end")
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        under_way.discard(temporary)
    if fault is not None:
        raise SnapshotError(f"The snapshot of step {begun.step} was not written to '{folder}': {fault}.")
    return Path(folder) / name_of(step)


@dataclass(frozen=True)
class _Begun:
    """What rank 0 tells the others before they write: the step, and the name of the temporary folder or a fault."""

    step: Any
    name: str = ""
    fault: str = ""


@dataclass(frozen=True)
class _Part:
    """What a rank tells rank 0 after it has written: its files, or a fault."""

    host: str
    files: dict[str, FileFacts] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    fault: str = ""


def _begin(folder: Path, step: Any) -> _Begun:
    try:
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise Wrong(f"step is {step!r}: give a whole number, 0 or more")
        name = temporary_name(name_of(step))
        make_folder(folder)
        (folder / name).mkdir()
        return _Begun(step, name)
    except Exception as error:  # the other ranks wait for an answer
        return _Begun(None, fault=_reason(error))


def _write_part(
    temporary: Path,
    step: int,
    step_here: Any,
    rank: int,
    weights: Mapping[str, Tensor],
    common: Any,
    own: Any,
) -> _Part:
    host = platform.node()
    files: dict[str, FileFacts] = {}
    aliases: dict[str, str] = {}
    try:
        if step_here != step:
            raise Wrong(f"step is {step_here!r} here and {step} on rank 0: write the same step on every rank")
        if not temporary.is_dir():
            raise Wrong(_not_shared(f"'{temporary}', which rank 0 made, is not there on host {host}"))
        _write_tree(temporary, own_name(rank), own, "own", files)
        if rank == 0:
            _write_tree(temporary, COMMON, common, "common", files)
            stored, aliases = _without_aliases(weights)
            with writing(temporary / MODEL) as file:
                write_tensors(stored, file)
            files[MODEL] = file.facts
        return _Part(host, files, aliases)
    except Exception as error:  # the other ranks wait for an answer
        return _Part(host, fault=_reason(error))


def _write_tree(folder: Path, name: str, value: Any, called: str, files: dict[str, FileFacts]) -> None:
    document, tensors = encode(value, called)
    text = dumps(document).encode()
    if len(text) > MAX_BYTES:
        raise Wrong(f"{called} {TOO_LARGE}")
    with writing(folder / f"{name}.json") as file:
        file.write(text)
    files[f"{name}.json"] = file.facts
    with writing(folder / f"{name}.safetensors") as file:
        write_tensors(tensors, file)
    files[f"{name}.safetensors"] = file.facts


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the further names of those that have several."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in weights.items():
        if type(name) is not str or name == "__metadata__" or not name.isprintable():
            raise Wrong(f"weights has the name {ascii(name)[:60]}: give printable texts as names")
        reason = check_tensor(tensor) if isinstance(tensor, Tensor) else "is no tensor: put it into common"
        if reason is not None:
            raise Wrong(f"weights[{name!r}] {reason}")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = names.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            stored[name] = tensor
        else:
            aliases[name] = first
    return stored, aliases


def _finish(temporary: Path, step: int, parts: list[_Part]) -> str | None:
    """Makes the parts a snapshot, or removes them and says why."""
    try:
        for rank, part in enumerate(parts):
            if part.fault:
                raise Wrong(f"rank {rank}: {part.fault}")
        files: dict[str, FileFacts] = {}
        for rank, part in enumerate(parts):
            for name, facts in part.files.items():
                path = temporary / name
                if not path.is_file() or path.stat().st_size != facts.bytes:
                    raise Wrong(
                        _not_shared(
                            f"rank {rank} on host {part.host} wrote '{path}', and rank 0 on host {parts[0].host} does not see it"
                        )
                    )
            files.update(part.files)
        manifest = new_manifest(step, len(parts), dict(sorted(files.items())), parts[0].aliases)
        with writing(temporary / MANIFEST) as file:
            file.write(text_of(manifest))
        sync_folder(temporary)
        put_in_place(temporary, temporary.parent / name_of(step))
        return None
    except Exception as error:  # the other ranks wait for an answer
        shutil.rmtree(temporary, ignore_errors=True)
        return str(error) if isinstance(error, Wrong) else f"rank 0: {_reason(error)}"


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


def _not_shared(what: str) -> str:
    return f"{what}: name a folder on a file system that all hosts share"


def _reason(error: Exception) -> str:
    """An error in one line, with the way out."""
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        way_out = "make room" if full else "name a folder that can be written to"
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}: {way_out}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
