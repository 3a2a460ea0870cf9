"""From a snapshot, of whatever number of ranks and stage, to one safetensors file with the whole weights.

Bytes go from the snapshot's files to their place in the new one, a mebibyte at a time, and are hashed on the way; no model is
needed, and hardly any memory. The new file gets its name when all of them have turned out to be what was written.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.snapshots.contents import check_average
from hvd_ckpt.snapshots.hashed_file import CHUNK, DAMAGED, HashedReader
from hvd_ckpt.snapshots.manifest import COMMON, MANIFEST, MODEL, shard_name, weights_name
from hvd_ckpt.snapshots.resharding import pairs_of
from hvd_ckpt.snapshots.shards import Range, Whole
from hvd_ckpt.snapshots.snapshot_files import SnapshotFiles, naming, opened
from hvd_ckpt.snapshots.tensor_file import Cut, Kind, checked_entries, dtype_called, entry_of, header_of

__all__ = ["Consolidated", "consolidate"]


@dataclass(frozen=True)
class Consolidated:
    """What :func:`consolidate` has written.

    Attributes:
        step: training steps taken.
        ranks: that wrote the snapshot.
        tensors: in the file.
        bytes: of the file.
    """

    step: int
    ranks: int
    tensors: int
    bytes: int


def consolidate(path: Path, output: Path, ema: bool = False) -> Consolidated:
    """Writes the weights and buffers of a snapshot as one safetensors file, with the names and shapes of ``state_dict()``.

    Tied weights are there under each of their names. The file is there whole or not at all.

    Args:
        path: of a snapshot.
        output: of the file, in a folder that exists.
        ema: write the moving averages of the weights in their place. Where the run was not sharded, this takes memory for rank 0's
            optimizer state.

    Raises:
        SnapshotError: the snapshot is damaged, or there is none, or it has no averages.
        FileExistsError: something has the file's name.
        OSError: the file cannot be written.
    """
    try:
        return _consolidate(path, output, ema)
    except _Unwritten as error:
        raise error.reason from None


class _Unwritten(Exception):
    """The new file could not be written; kept apart from what is wrong with the snapshot's files."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _consolidate(path: Path, output: Path, ema: bool) -> Consolidated:
    with opened(path) as files:
        manifest = files.manifest
        split = (
            manifest.shards if manifest.shards is not None and manifest.shards.weights is not None else None
        )
        with files.reading(MODEL) as model:
            kinds = checked_entries(model)
            whole = {} if split is None else {name: _kind(one) for name, one in split.parameters.items()}
            with naming(path, MANIFEST):
                wanted = _all_names(kinds, whole, manifest.aliases)
            with _new_file(output) as descriptor:
                places, size = _begin(descriptor, wanted)
                for name, kind in kinds.items():
                    _copy(model, descriptor, places[name], kind.stop - kind.start)
                model.check()
                for rank, ranges in enumerate(split.weights or () if split is not None else ()):
                    _copy_pieces(files, rank, ranges, whole, descriptor, places)
                for name, one in split.parameters.items() if split is not None else ():
                    if one.order is not None:
                        _reorder(descriptor, places[name], one)
                if ema:
                    _write_averages(files, descriptor, places, wanted)
                for alias, name in manifest.aliases.items():
                    _duplicate(descriptor, places[name], places[alias], wanted[name])
        return Consolidated(manifest.step, manifest.ranks, len(wanted), size)


def _write_averages(
    files: SnapshotFiles, descriptor: int, places: Mapping[str, int], kinds: Mapping[str, Kind]
) -> None:
    """Puts averages in the places of the weights."""
    shards = files.manifest.shards
    common = files.tree(COMMON)
    with naming(files.path, COMMON):
        check_average(common.get("ema") if isinstance(common, dict) else None, "ema", shards is not None)
        if not isinstance(common, dict) or common.get("ema") is None:
            raise Wrong("it has no averages of the weights: consolidate without --ema")
    if shards is None:
        for name, average in common["ema"]["averages"].items():
            _write_part(
                files, COMMON, (name, 0, average.numel()), average.contiguous(), descriptor, places, kinds
            )
        return
    for rank, ranges in enumerate(shards.optimizer):
        file = shard_name(rank)
        part = files.tree(file, _averages_alone)
        with naming(files.path, file):
            averages = part.get("averages") if isinstance(part, dict) else None
            if not isinstance(averages, dict) or set(averages) != set(range(len(ranges))):
                raise Wrong(f"it has not the averages that the manifest says: {DAMAGED}")
        for number, average in averages.items():
            _write_part(files, file, ranges[number], average, descriptor, places, kinds)
    for name in {name for ranges in shards.optimizer for name, _, _ in ranges}:
        if shards.parameters[name].order is not None:
            _reorder(descriptor, places[name], shards.parameters[name])


def _averages_alone(document: Any) -> Cut:
    """Leaves out the other tensors of a rank's part."""
    pairs = pairs_of(document.get("averages") if isinstance(document, dict) else None)
    wanted = {value.get("$tensor") for _, value in pairs}
    return lambda name, shape: None if name in wanted else (0, 0)


def _write_part(
    files: SnapshotFiles,
    file: str,
    part: Range,
    values: Any,
    descriptor: int,
    places: Mapping[str, int],
    kinds: Mapping[str, Kind],
) -> None:
    name, start, stop = part
    with naming(files.path, file):
        if name not in kinds or not isinstance(values, torch.Tensor) or values.numel() != stop - start:
            raise Wrong(f"the average of {shown(name)} is not of its size: {DAMAGED}")
    dtype = kinds[name].dtype
    content = values.to(dtype).reshape(-1).view(torch.uint8)
    if content.numel():
        _write(descriptor, content.numpy().data, places[name] + start * dtype.itemsize)


def _kind(whole: Whole) -> Kind:
    dtype = dtype_called(whole.dtype)
    assert dtype is not None
    return Kind.of(dtype, list(whole.shape))


def _all_names(
    kinds: Mapping[str, Kind], whole: Mapping[str, Kind], aliases: Mapping[str, str]
) -> dict[str, Kind]:
    """All tensors that the file is to have."""
    both = {**kinds, **whole}
    if len(both) < len(kinds) + len(whole):
        raise Wrong(
            f"shards.parameters have {shown(min(set(kinds) & set(whole)))}, which rank 0 has whole: {DAMAGED}"
        )
    for alias, name in aliases.items():
        if alias in both or name not in both:
            raise Wrong(f"the alias {shown(alias)} of {shown(name)} cannot be one: {DAMAGED}")
    return {**both, **{alias: both[name] for alias, name in aliases.items()}}


@contextmanager
def _new_file(output: Path) -> Iterator[int]:
    """The descriptor of a file that gets its name when the context is left without an error."""
    with _writing():
        _check_new(output)
    unnamed = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    with _writing():
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        with _writing():
            os.fsync(descriptor)
            _check_new(output)
            os.rename(unnamed, output)
    except BaseException:
        unnamed.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _check_new(output: Path) -> None:
    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritten(error) from None


def _begin(descriptor: int, kinds: Mapping[str, Kind]) -> tuple[dict[str, int], int]:
    """Writes the header; returns where each tensor begins, and the size of the whole file."""
    names = sorted(kinds, key=lambda name: (-kinds[name].stored.itemsize, name))
    position = 0
    entries, notes = {}, {"format": "pt"}
    starts = {}
    for name in names:
        starts[name] = position
        kind = kinds[name]
        entries[name], note = entry_of(name, kind, position)
        notes.update(note)
        position += kind.stop - kind.start
    head = header_of(entries, notes)
    _write(descriptor, memoryview(head), 0)
    with _writing():
        os.truncate(descriptor, len(head) + position)
    return {name: len(head) + start for name, start in starts.items()}, len(head) + position


def _copy_pieces(
    files: SnapshotFiles,
    rank: int,
    ranges: tuple[Range, ...],
    whole: Mapping[str, Kind],
    descriptor: int,
    places: Mapping[str, int],
) -> None:
    expected = {name: (start, stop) for name, start, stop in ranges}
    with files.reading(weights_name(rank)) as file:
        kinds = checked_entries(file)
        if set(kinds) != set(expected):
            raise Wrong(f"it has other parameters than the manifest says: {DAMAGED}")
        for name, kind in kinds.items():
            start, stop = expected[name]
            if kind.shape != [stop - start] or kind.dtype != whole[name].dtype:
                raise Wrong(f"{shown(name)} is not what the manifest says: {DAMAGED}")
            _copy(file, descriptor, places[name] + start * kind.dtype.itemsize, kind.stop - kind.start)
        file.check()


def _copy(file: HashedReader, descriptor: int, place: int, size: int) -> None:
    buffer = memoryview(bytearray(min(CHUNK, size)))
    for start in range(0, size, CHUNK):
        part = buffer[: size - start]
        file.fill(part)
        _write(descriptor, part, place + start)


def _duplicate(descriptor: int, source: int, place: int, kind: Kind) -> None:
    size = kind.stop - kind.start
    for start in range(0, size, CHUNK):
        _write(
            descriptor, memoryview(_read(descriptor, source + start, min(CHUNK, size - start))), place + start
        )


def _reorder(descriptor: int, place: int, whole: Whole) -> None:
    """Has the elements of a tensor, which are as they lay in memory, in the order of its dimensions."""
    dtype = dtype_called(whole.dtype)
    assert dtype is not None
    content = _read(descriptor, place, math.prod(whole.shape) * dtype.itemsize)
    if content:
        tensor = whole.unflatten(torch.frombuffer(content, dtype=dtype)).contiguous()
        _write(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data, place)


def _read(descriptor: int, place: int, size: int) -> bytearray:
    content = bytearray(size)
    view, read = memoryview(content), 0
    with _writing():
        while read < size:
            count = os.preadv(descriptor, [view[read:]], place + read)
            if not count:
                raise OSError(errno.EIO, "it became shorter while it was written")
            read += count
    return content


def _write(descriptor: int, data: memoryview, place: int) -> None:
    with _writing():
        while data:
            written = os.pwrite(descriptor, data, place)
            data, place = data[written:], place + written
