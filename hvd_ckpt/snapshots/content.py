"""The content of a snapshot: a rank's shards, staged in host memory, written, and completed by rank 0.

:class:`RunShards` (one per run) makes a :class:`ShardState` (tensors of this rank, not copied). :func:`staged_content` makes a
:class:`Content` (copies, by file) from it. :func:`write_content` returns the manifest of the rank, and :func:`complete` that of
the snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from hvd_ckpt.parallel.local_sgd.optimizer import STATE, LocalOptimizer
from hvd_ckpt.processes.grid import current, host_name
from hvd_ckpt.reduction.collectives import ranks_of
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange, ranges_of
from hvd_ckpt.sharding.state_view import COUNTERS
from hvd_ckpt.snapshots.barrier import RankManifest, not_shared
from hvd_ckpt.snapshots.folder import Warn, discard, name_of, put_in_place, reason_of, sync_folder
from hvd_ckpt.snapshots.schema import (
    MANIFEST,
    MODEL,
    REPLICATED,
    FileEntry,
    Manifest,
    RankShards,
    ShardMetadata,
    TensorMetadata,
    merged,
    rank_file,
    shard_file,
    weights_file,
)
from hvd_ckpt.snapshots.tensors import (
    AsyncCopy,
    Staging,
    check_tensor,
    map_tensors,
    save_bytes,
    save_state,
    save_weights,
)
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.schema import Wrong, first_error

# of the state of a DistributedOptimizer: not the wrapped optimizer's, and elsewhere in a snapshot
_OF_A_RANK = ("pieces", "stage", "ranks", "rank", STATE)
SMALL = 4096  # bytes of a tensor that is not worth leaving to the thread


def of_wrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the wrapped optimizer, given that of a ``DistributedOptimizer``."""
    return {name: value for name, value in state.items() if name not in _OF_A_RANK}


@dataclass(frozen=True)
class ShardState:
    """The shards that a rank of a sharded run writes besides its per-rank state.

    Attributes:
        shards: where its shards are.
        aliases: further names of tied parameters, and the name under which each is in ``shards.parameters``.
        state: state of the optimizer, ``{"state", "param_groups"}``, with ``"master_weights"`` and ``"averages"`` by number of the
            shard.
        weights: its shards of the exact weights, by parameter; None where the model's own are exact and whole.
    """

    shards: RankShards
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None


class RunShards:
    """Makes the :class:`ShardState` of a run.

    In pipeline stages and parts all ranks write weights and optimizer state as shards, each element once: what all replicas of a
    stage have, the first of them writes. Where groups of local SGD are sharded, rank 0's group writes the shards, the others none.

    Args:
        model: whole, sharded or a ``Pipeline``.
        optimizer: its ``DistributedOptimizer``.

    Attributes:
        aliases: further names of tied parameters, and the name under which each is in a snapshot.
        stage: stage of sharding, from 0 to 3.
        sharded: whether the optimizer's state is split over the ranks.
        is_first: whether this rank's group is that of rank 0, which without local SGD is all ranks.
        splits_each: whether exact weights are split, too, since the model's own are not whole or not exact.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.stage, self._is_spread = optimizer.shard_stage, current().model_parallel_size > 1
        self.sharded = self.stage > 0 or self._is_spread
        self.is_first = not isinstance(optimizer, LocalOptimizer) or 0 in ranks_of(optimizer.process_set)
        self.aliases: dict[str, str] = {}
        if self.sharded:
            self._tensors, self.aliases = tensors_of(model, self._is_spread, optimizer)
            names = {*self._tensors, *self.aliases}
            self._buffers = [name for name in named_tensors(model) if name not in names]
        self.splits_each = self.stage == 3 or (self.stage > 0 and optimizer.sharding.store.is_lossy)

    def stored_name(self, name: str) -> str:
        """The name of a parameter in a snapshot."""
        return self.aliases.get(name, name)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights that rank 0 writes: ``model.state_dict()``, or only what no rank has in its shards."""
        if not self.splits_each and not self._is_spread:
            # Extra state of modules is each rank's; a tensor is here as well, for those who load the weights alone.
            return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {name: buffers[name] for name in self._buffers}

    def state(
        self, model: nn.Module, optimizer: Any, averages: Mapping[int, Tensor] | None
    ) -> ShardState | None:
        """The shards that this rank writes, not copied; None where nothing is sharded.

        Args:
            optimizer: a ``DistributedOptimizer``.
            averages: averages of the weights, by number of the shard.
        """
        if not self.sharded:
            return None
        part = optimizer.state_dict()
        state = of_wrapped(part)
        if averages is not None:
            state["averages"] = dict(averages)
        pieces: Sequence[Any] = part["pieces"] if self.stage else _flatten(state, ranges_of(optimizer))
        pieces = [(self.stored_name(name), start, stop) for name, start, stop in pieces]
        weights = self._own_weights(model, optimizer)
        if self._is_spread:
            # A tied parameter is the first of its stages' to write, what is whole the first replica's, and a copy the first part's.
            own = dict(model.named_parameters()) if self.stage or current().replica == 0 else {}
            pieces = _select(state, pieces, [name for name, tensor in own.items() if _is_own(tensor)])
        # Other groups of local SGD write no shards: what their ranks have
        # of their own is in the state of each rank (snapshots.local).
        if not self.is_first:
            pieces, weights = _select(state, pieces, ()), None if weights is None else []
        shards = RankShards(
            stage=self.stage,
            pipeline_stages=current().stages,
            tensor=current().tensor,
            # Once for all ranks: rank 0 would read them of each.
            parameters=self._tensors if current().number == 0 else {},
            optimizer=ShardMetadata.of(pieces),
            weights=None if weights is None else ShardMetadata.of(piece[:3] for piece in weights),
        )
        flat = None if weights is None else {name: values for name, _, _, values in weights}
        return ShardState(shards, self.aliases, state, flat)

    def _own_weights(self, model: nn.Module, optimizer: Any) -> list[tuple[str, int, int, Tensor]] | None:
        """Name, first and last + 1 element, and values of the weights that this rank writes; None if rank 0 writes all."""
        if not self._is_spread:
            return optimizer.weight_pieces() if self.splits_each else None
        own: dict[str, Tensor] = dict(model.named_parameters())
        own.update(model.named_buffers())
        own = {name: tensor for name, tensor in own.items() if _is_own(tensor)}
        first = current().replica == 0
        pieces = [
            (name, 0, tensor.numel(), TensorSpec.of(tensor).flatten(tensor))
            for name, tensor in own.items()
            if first and name in self._tensors and not (self.splits_each and isinstance(tensor, nn.Parameter))
        ]
        if self.splits_each:
            pieces += [piece for piece in optimizer.weight_pieces() if piece[0] in own]
        # A rank behind the last element of a parameter has an empty shard, which the manifest does not list.
        return [piece for piece in pieces if piece[1] < piece[2]]

    def publish_weights(self, optimizer: Any) -> None:
        """Gives the model the weights it had after the last step, which lossy communication made of the exact ones. Collective."""
        if self.splits_each and self.stage < 3:
            store, layout = optimizer.sharding.store, optimizer.sharding.layout
            store.shards_changed([group for group in layout.groups if group.requires_grad])


def _is_own(tensor: Tensor) -> bool:
    """Whether this part writes a tensor: each part its slice of a cut tensor, the first part those that are equal on all parts."""
    return current().part == 0 or cut_of(tensor) is not None


def _flatten(state: Mapping[str, Any], ranges: Sequence[ShardRange]) -> list[tuple[str, int, int]]:
    """Makes 1-D shards of the state and averages of whole parameters, in place; returns their names, first and last + 1 element."""
    for number, whole in enumerate(ranges):
        entries = dict(state["state"].get(number, {}))
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == whole.spec.shape and name not in COUNTERS:
                entries[name] = whole.spec.flatten(value)
        if entries:
            state["state"][number] = entries
        if "averages" in state:
            state["averages"][number] = whole.spec.flatten(state["averages"][number])
    return [(elements.name, elements.start, elements.stop) for elements in ranges]


def _select(state: dict[str, Any], pieces: Sequence[Any], names: Collection[str]) -> list[Any]:
    """Leaves those pieces of a state that are of these parameters and have elements, renumbered; returns them."""
    kept = [number for number, (name, start, stop) in enumerate(pieces) if name in names and start < stop]
    renumbered = {old: new for new, old in enumerate(kept)}
    for entry in ("state", "master_weights", "averages"):
        if entry in state:
            state[entry] = {
                renumbered.get(old, old): value
                for old, value in state[entry].items()
                if old in renumbered or not isinstance(old, int)
            }
    state["param_groups"] = [
        {**group, "params": [renumbered[old] for old in group["params"] if old in renumbered]}
        for group in state["param_groups"]
    ]
    return [pieces[number] for number in kept]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all names that they have in ``state_dict()``, which is refused where parameters are split."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def tensors_of(
    model: nn.Module, buffers: bool, optimizer: Any = None
) -> tuple[dict[str, TensorMetadata], dict[str, str]]:
    """The parameters of a whole model, also of one in pipeline stages, and the further names of those that are tied.

    Args:
        buffers: also the buffers in ``state_dict()``.
        optimizer: that may have sharded them.
    """
    layout = optimizer.sharding.layout if hasattr(optimizer, "sharding") else None
    # Tied parameters are one tensor, by which they are found. In a Pipeline,
    # those of other stages are freed, so it has noted their names.
    known = getattr(model, "_first_names", None)  # of a Pipeline
    whole = model if known is None else model.__dict__["_model"]
    first: dict[int, str] = {}
    tensors: dict[str, TensorMetadata] = {}
    aliases: dict[str, str] = {}
    named = dict(whole.named_parameters(remove_duplicate=False))
    if buffers:
        named.update(named_tensors(whole))
    for name, tensor in named.items():
        stored = first.setdefault(id(tensor), name) if known is None else known[name]
        if stored != name:
            aliases[name] = stored
        else:
            index = None if layout is None else layout.index(tensor)
            spec = TensorSpec.of(tensor) if layout is None or index is None else layout.specs[index]
            tensors[name] = TensorMetadata.of(tensor, spec)
    return tensors, aliases


@dataclass
class Content:
    """The files that a rank writes.

    Attributes:
        states: state dicts by file name.
        weights: tensors by file name.
        aliases: further names of weights.
        shards: where the rank's shards are; None where nothing is sharded.
        copying: copies the tensors into those of ``states`` and ``weights``; None where these are the tensors themselves.
    """

    states: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shards: RankShards | None = None
    copying: AsyncCopy | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        sizes: list[int] = []
        for state in (*self.states.values(), self.weights):
            map_tensors(state, "state", lambda tensor, _: sizes.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
        return sum(sizes)


def staged_content(
    rank: int,
    staging: Staging | None,
    weights: Mapping[str, Tensor],
    replicated: Any,
    per_rank: Any,
    changing: Collection[str],
    shard: ShardState | None,
) -> Content:
    """The files that a rank writes, with copies in place of tensors. Tensors that may change at once are copied here.

    For the arguments see :meth:`hvd_ckpt.snapshots.writer.SnapshotWriter.begin`.

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
        small = tensor.numel() * tensor.itemsize <= SMALL
        (now if small or at_once else later).append((tensor, copy))
        return copy

    content = Content()
    if staging is not None:
        staging.restart()
    own = map_tensors(per_rank, "per_rank", lambda tensor, place: staged(tensor, place, True))
    content.states[rank_file(rank)] = own
    if rank == 0:
        content.states[REPLICATED] = map_tensors(replicated, "replicated", staged)
        stored, content.aliases = _without_aliases(weights)
        hasty = {content.aliases.get(name, name) for name in changing}
        content.weights[MODEL] = {
            name: staged(tensor, f"weights[{name!r}]", name in hasty) for name, tensor in stored.items()
        }
    if shard is not None:
        content.shards = shard.shards
        content.states[shard_file(rank)] = map_tensors(shard.state, "shard", staged)
        if shard.weights is not None:
            content.weights[weights_file(rank)] = {
                name: staged(tensor, f"weights[{name!r}]", name in changing)
                for name, tensor in shard.weights.items()
            }
            content.aliases.update(shard.aliases if rank == 0 else {})
    if staging is not None:
        # The loop goes on when this returns. What is in `now` may change at once; `later` is copied before the next update.
        content.copying = AsyncCopy(now, later)
    return content


def write_content(temporary: Path, content: Content) -> RankManifest:
    """Writes a rank's files, which are on the disk when this returns."""
    files: dict[str, FileEntry] = {}
    for name, state in content.states.items():
        files[name] = save_state(temporary / name, state)
    for name, weights in content.weights.items():
        files[name] = save_weights(temporary / name, weights)
    return RankManifest(host=host_name(), files=files, aliases=content.aliases, shards=content.shards)


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
        for rank, manifest in enumerate(ranks):
            for name, entry in manifest.files.items():
                path = temporary / name
                # Also a check that all ranks write to one file system: on another host, the same path may be a folder of its own.
                if not path.is_file() or path.stat().st_size != entry.bytes:
                    seen = f"rank 0 on host {ranks[0].host} does not see it"
                    raise Wrong(not_shared(f"rank {rank} on host {manifest.host} wrote '{path}', and {seen}"))
            files.update(manifest.files)
        sharding = merged([manifest.shards for manifest in ranks])
        whole = Manifest.of(step, len(ranks), files, ranks[0].aliases, sharding)
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


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the further names of those that have several."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in weights.items():
        if type(name) is not str or name == "__metadata__" or not name.isprintable():
            raise Wrong(f"weights has the name {ascii(name)[:60]}: give printable texts as names")
        check_tensor(tensor, f"weights[{name!r}]")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = names.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            stored[name] = tensor
        else:
            aliases[name] = first
    return stored, aliases
