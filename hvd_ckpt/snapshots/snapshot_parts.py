"""What a snapshot is made of on its way to the disk: a part of each rank, of which rank 0 makes one folder.

Both ways of writing are made of these steps: on all ranks at once (:mod:`hvd_ckpt.snapshots.snapshot_write`), and beside training
(:mod:`hvd_ckpt.snapshots.background`). They differ in how the ranks tell rank 0 of their parts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_ckpt.json_file import MAX_BYTES, Wrong, dumps
from hvd_ckpt.peers import host_name
from hvd_ckpt.snapshots.hashed_file import FileFacts, writing
from hvd_ckpt.snapshots.manifest import (
    COMMON,
    MANIFEST,
    MAX_STEP,
    MODEL,
    new_manifest,
    own_name,
    parse_manifest,
    shard_name,
    text_of,
    weights_name,
)
from hvd_ckpt.snapshots.shards import OwnShard, Shards, Whole
from hvd_ckpt.snapshots.snapshot_folder import Warn, discard, make_folder, name_of, put_in_place, sync_folder
from hvd_ckpt.snapshots.tensor_file import check_tensor, write_tensors
from hvd_ckpt.snapshots.tree import encode

__all__ = [
    "TOO_LARGE",
    "Content",
    "Part",
    "Tree",
    "check_step",
    "content_of",
    "finish",
    "make_temporary",
    "not_shared",
    "reason_of",
    "write_content",
]

TOO_LARGE = f"is more than {MAX_BYTES >> 20} MiB of JSON: put what is large into tensors"


@dataclass
class Tree:
    """A tree of plain values and tensors, encoded.

    Attributes:
        name: of its files, without their endings.
        called: what messages call it.
        document: what becomes JSON.
        tensors: its tensors; those that were given, until they are replaced by copies.
    """

    name: str
    called: str
    document: Any
    tensors: dict[str, Tensor]


@dataclass
class Content:
    """What a rank writes.

    Attributes:
        rank: whose it is.
        own: what is the rank's own.
        common: what is the same on every rank; None where another rank writes it.
        weights: each once; None where another rank writes them.
        aliases: further names of weights.
        shard: the rank's part of the optimizer's state; None where that is in common.
        pieces: the rank's part of the weights, by the parameters' names; None where they are in weights.
        split: which these parts are; None where nothing is split over the ranks.
    """

    rank: int
    own: Tree
    common: Tree | None = None
    weights: dict[str, Tensor] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    shard: Tree | None = None
    pieces: dict[str, Tensor] | None = None
    split: Split | None = None

    @property
    def lasting(self) -> list[dict[str, Tensor]]:
        """The tensors that only an optimizer's step changes; these, and not copies of them, are to be replaced."""
        trees = [tree.tensors for tree in (self.common, self.shard) if tree is not None]
        return trees + [tensors for tensors in (self.weights, self.pieces) if tensors is not None]


@dataclass(frozen=True)
class Split:
    """Which parts of what is split over the ranks a rank has.

    Attributes:
        stage: of the run.
        ranges: of its ``optimizer`` state and its ``weights``, as lists for JSON; None where rank 0 has whole weights.
        parameters: of the model; only rank 0 tells them.
    """

    stage: int
    ranges: dict[str, Any]
    parameters: dict[str, Whole] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What a rank tells rank 0 after it has written: its files and what is in them, or a fault."""

    host: str
    files: dict[str, FileFacts] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    split: Split | None = None
    fault: str = ""


def check_step(step: Any) -> None:
    """Raises Wrong unless it is the number of a step."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise Wrong(f"step is {step!r}: give a whole number, 0 or more")


def make_temporary(temporary: Path) -> None:
    """Makes the folder that the parts are written to, and those above it. For one rank to call."""
    make_folder(temporary.parent)
    temporary.mkdir()


def content_of(
    rank: int, weights: Mapping[str, Tensor], common: Any, own: Any, shard: OwnShard | None = None
) -> Content:
    """What a rank writes, encoded; nothing is copied.

    Raises:
        Wrong: something in it cannot be stored.
    """
    content = Content(rank, _tree(own_name(rank), "own", own))
    if rank == 0:
        content.common = _tree(COMMON, "common", common)
        content.weights, content.aliases = _without_aliases(weights)
    if shard is not None:
        content.shard = _tree(shard_name(rank), "shard", shard.state)
        if shard.weights is not None:
            content.pieces = {name: values.detach() for name, _, _, values in shard.weights}
            for name, values in content.pieces.items():
                _check_weight(name, values)
            content.aliases.update(shard.aliases if rank == 0 else {})
        content.split = Split(shard.stage, shard.ranges, dict(shard.parameters) if rank == 0 else {})
    return content


def write_content(temporary: Path, content: Content) -> Part:
    """Writes a rank's part; its content is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
        Wrong: it is too large.
    """
    files: dict[str, FileFacts] = {}
    for tree in (content.own, content.common, content.shard):
        if tree is not None:
            _write_tree(temporary, tree, files)
    for name, tensors in ((MODEL, content.weights), (weights_name(content.rank), content.pieces)):
        if tensors is not None:
            with writing(temporary / name) as file:
                write_tensors(tensors, file)
            files[name] = file.facts
    return Part(host_name(), files, content.aliases, content.split)


def finish(temporary: Path, step: int, parts: Sequence[Part], warn: Warn | None = None) -> str | None:
    """Makes the parts a snapshot, or removes them and says why. For rank 0 to call.

    Args:
        parts: of all ranks, in their order.
        warn: is told what of an older snapshot cannot be removed; by default it is a warning of Python's.
    """
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
                        not_shared(
                            f"rank {rank} on host {part.host} wrote '{path}', and rank 0 on host {parts[0].host} does not see it"
                        )
                    )
            files.update(part.files)
        shards = _shards([part.split for part in parts])
        text = text_of(new_manifest(step, len(parts), dict(sorted(files.items())), parts[0].aliases, shards))
        parse_manifest(text)  # what ranks told of themselves may be damaged
        with writing(temporary / MANIFEST) as file:
            file.write(text)
        sync_folder(temporary)
        put_in_place(temporary, temporary.parent / name_of(step), warn)
        return None
    except Exception as error:  # the other ranks wait for an answer
        discard(temporary)
        return str(error) if isinstance(error, Wrong) else f"rank 0: {reason_of(error)}"


def _shards(splits: Sequence[Split | None]) -> Shards | None:
    first = splits[0]
    if first is None:
        return None
    if any(one is None or one.stage != first.stage for one in splits):
        raise Wrong("ranks split different things: give every rank the same settings")
    ranges = [one.ranges for one in splits if one is not None]
    weights = None if first.ranges["weights"] is None else tuple(one["weights"] for one in ranges)
    return Shards(first.stage, first.parameters, tuple(one["optimizer"] for one in ranges), weights)


def not_shared(what: str) -> str:
    """A sentence about ranks that see different folders, with the way out."""
    return f"{what}: name a folder on a file system that all hosts share"


def reason_of(error: Exception) -> str:
    """An error in one line, with the way out."""
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        way_out = "make room" if full else "name a folder that can be written to"
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}: {way_out}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _tree(name: str, called: str, value: Any) -> Tree:
    return Tree(name, called, *encode(value, called))


def _write_tree(folder: Path, tree: Tree, files: dict[str, FileFacts]) -> None:
    text = dumps(tree.document).encode()
    if len(text) > MAX_BYTES:
        raise Wrong(f"{tree.called} {TOO_LARGE}")
    with writing(folder / f"{tree.name}.json") as file:
        file.write(text)
    files[f"{tree.name}.json"] = file.facts
    with writing(folder / f"{tree.name}.safetensors") as file:
        write_tensors(tree.tensors, file)
    files[f"{tree.name}.safetensors"] = file.facts


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the further names of those that have several."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in weights.items():
        _check_weight(name, tensor)
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = names.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            stored[name] = tensor.detach()
        else:
            aliases[name] = first
    return stored, aliases


def _check_weight(name: Any, tensor: Any) -> None:
    if type(name) is not str or name == "__metadata__" or not name.isprintable():
        raise Wrong(f"weights has the name {ascii(name)[:60]}: give printable texts as names")
    reason = check_tensor(tensor) if isinstance(tensor, Tensor) else "is no tensor: put it into common"
    if reason is not None:
        raise Wrong(f"weights[{name!r}] {reason}")
