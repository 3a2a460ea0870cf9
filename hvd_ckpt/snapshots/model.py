"""The tensors of a model and of its optimizer: their names in a snapshot, and which elements of them this process has.

Saving, loading and comparison all go over the same :class:`Part` objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import Range, TensorMetadata
from hvd_ckpt.snapshots.tensors import map_tensors, not_stored, stored
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.elementwise import COUNTERS
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.states import NOT_SPLIT, OptimizerState, described, is_single

# Of the state of a DistributedOptimizer: not the wrapped optimizer's, and elsewhere in a snapshot.
_OF_A_RANK = ("pieces", "stage", "ranks", "rank", "master_weights", "local_sgd")
EXTRA = "_extra_state"


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter or buffer, which this process has, or has state of.

    Attributes:
        name: in a snapshot.
        tensor: the parameter or buffer.
        spec: its shape, which a state has if this is all of it; None for a shard, whose state is 1-D.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int
    spec: TensorSpec | None = None

    @classmethod
    def all_of(cls, name: str, tensor: Tensor) -> Part:
        return cls(name, tensor, 0, tensor.numel(), TensorSpec.of(tensor))

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.stop - self.start]) if self.spec is None else self.spec.shape

    def shaped(self, flat: Tensor) -> Tensor:
        """Its elements in the shape that a state has; a view."""
        return flat if self.spec is None else self.spec.unflatten(flat)


class ModelTensors:
    """The tensors of a model by the names that they have in a snapshot: for tied ones the first.

    Args:
        model: whole, sharded or in pipeline stages.
        optimizer: that steps it, distributed or not; None if only weights matter.

    Attributes:
        tensors: parameters and buffers of this process, by name.
        aliases: further names of tied tensors of the whole model, and the name that each is stored under.
        in_stages: whether the model has some blocks of a whole one.
        layout: of shards; None without them.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._optimizer, self._grid = optimizer, current()
        is_sharded = getattr(optimizer, "shard_stage", 0) > 0
        self.layout: Any = optimizer.sharding.layout if is_sharded else None
        # Under all names that they have in state_dict(), which is refused where parameters are split.
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    named[f"{prefix}.{name}" if prefix else name] = buffer
        # Tied tensors are one, by which they are found. In pipeline stages, those of other stages are
        # freed, so the model has noted the names.
        first: dict[int, str] = {}
        known = getattr(model, "_first_names", None)
        self.in_stages = known is not None
        if known is None:
            known = {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}
        self.aliases = {name: stored for name, stored in known.items() if stored != name}
        self.tensors = {known[name]: tensor for name, tensor in named.items()}
        self._names = {id(tensor): known[name] for name, tensor in named.items()}
        self._mine = {name for name in named if known[name] == name}
        whole = [
            Part.all_of(name, tensor)
            for name, tensor in self.tensors.items()
            if self.layout is None or self.layout.index(tensor) is None or not tensor.numel()
        ]
        self._parameters = [part for part in whole if isinstance(part.tensor, nn.Parameter)]
        self._buffers = [part for part in whole if not isinstance(part.tensor, nn.Parameter)]
        self._own_buffers = dict(model.named_buffers())

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> tuple[TensorMetadata, int]:
        """The whole tensor, or its state of another dtype, and the first element there of this process's part."""
        index = None if self.layout is None else self.layout.index(tensor)
        spec = TensorSpec.of(tensor) if index is None else self.layout.specs[index]
        whole = TensorMetadata.of(dtype or tensor.dtype, spec, cut_of(tensor), self._grid.tensor)
        return whole, whole.place_of(self._grid.part)[0]

    def range_of(self, kind: str, part: Part, values: Tensor | None = None) -> Range:
        """The elements of a part in a snapshot, to read them, or to write these values."""
        whole, first = self.place(part.tensor, None if values is None else values.dtype)
        return Range(f"{kind}/{part.name}", first + part.start, first + part.stop, whole, values)

    @property
    def is_split(self) -> bool:
        """Whether the optimizer's state is split over ranks, stages or parts."""
        return self.layout is not None or self._grid.model_parallel_size > 1

    @property
    def copy(self) -> str:
        """Whose weights this rank has, such as ``"@3"``, if those of local SGD have their own; an empty text for rank 0's."""
        first = ranks_of(self._optimizer.process_set)[0]
        return f"@{first}" if first else ""

    def _shards(self) -> Iterator[tuple[Part, Tensor]]:
        """This rank's shards of the parameters, and their exact values."""
        if self.layout is not None:
            known = dict(zip(self.layout.names, self.layout.parameters))
            for name, start, stop, values in self._optimizer.weight_pieces():
                yield Part(self._names.get(id(known[name]), name), known[name], start, stop), values

    def weights(self) -> list[Part]:
        """Parameters and buffers: whole ones, then this rank's shards of the others."""
        return [*self._parameters, *self._buffers, *(part for part, _ in self._shards())]

    def reading(self, snapshot: Snapshot, copy: str = "") -> Callable[[], None]:
        """Verifies the files with weights and buffers of this process, whose are those of :attr:`copy`, and returns a function that
        copies them into the model. That is collective, if the optimizer is sharded."""
        there, own = snapshot.manifest.tensors, snapshot.own_buffers
        parts, wanted = self.weights(), list[Range]()
        for part in parts:
            kind = f"weights{copy}"
            if not isinstance(part.tensor, nn.Parameter):  # its own, in this rank's file, or those of rank 0
                kind = own if f"{own}/{part.name}" in there else "weights"
            stored = snapshot.manifest.aliases.get(part.name, part.name)
            wanted.append(self.range_of(kind, part._replace(name=stored)))
        with snapshot.comparing():
            values = snapshot.read(wanted)

        def copy_all() -> None:
            whole = [part for part in parts if part.spec is not None]
            with torch.no_grad():
                for part, flat in zip(whole, values):
                    if part.stop:
                        part.tensor.copy_(part.shaped(flat))
            if self.layout is not None:
                shards = zip(self._optimizer.weight_pieces(), values)
                self._optimizer.load_weight_pieces((*shard[:3], flat) for shard, flat in shards)

        return copy_all

    @cached_property
    def parts(self) -> list[Part]:
        """What the optimizer steps, in the order of its groups."""
        if self.layout is None:
            groups = zip(self.groups(), self._optimizer.param_groups)
            return [Part.all_of(*each) for names, group in groups for each in zip(names, group["params"])]
        parts = []
        for piece in self._optimizer.pieces:
            parameter = self.layout.parameters[piece.index]
            name = self._names.get(id(parameter), piece.name)
            parts.append(Part(name, parameter, piece.start, piece.stop))
        return parts

    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        known = getattr(self._optimizer, "parameter_names", {})
        return [
            [self._names.get(id(parameter)) or known[parameter] for parameter in group["params"]]
            for group in self._optimizer.param_groups
        ]

    # -------------------------------------------------------------------------------- saving

    def saved(
        self, average: Any, extra: Mapping[str, Any], alone: bool = False
    ) -> tuple[list[Range], dict[str, Any]]:
        """The ranges that this rank writes, and the plain values of its optimizer: by name, and others. Ranks that have equal
        tensors share the writing. Raises Wrong if no run could resume from the state of the optimizer.

        Args:
            average: averages of the weights, or None.
            extra: the extra states of modules.
            alone: write all that this rank has, as if there were no others.
        """
        optimizer, copy = self._optimizer, "" if alone else self.copy
        # The ranks that have the same weights and share the writing.
        members = [hvd.rank()] if alone else ranks_of(optimizer.process_set)
        is_first = hvd.rank() == members[0]
        own_state = optimizer.reduces_updates and not alone  # that of this rank's gradients
        # All that this rank has: kinds, elements and their values.
        rows: list[tuple[str, Part, Tensor]] = []
        for part in self._parameters:  # one without elements may be in the layout, with a class of its own
            values = part.tensor if part.stop else torch.empty(part.shape, dtype=part.tensor.dtype)
            rows.append(("weights", part, values))
        rows += [("weights", part, values) for part, values in self._shards() if self._writes(part)]
        state = optimizer.state_dict()
        averages = {} if average is None else average.state_dict()["averages"]
        others = ("master_weights", state.get("master_weights", {})), ("average", averages)
        kept = dict(state["state"])
        stepped = [(number, part) for number, part in enumerate(self.parts) if self._writes(part)]
        for number, part in stepped:
            if isinstance(kept.get(number), dict):
                kept[number], found = divided(kept[number], part.shape)
                rows += [(kind, part, value) for kind, value in found.items()]
            rows += [(kind, part, values[number]) for kind, values in others if number in values]
        shares = self._shares_of(members)
        own: list[Range] = []
        for kind, part, values in rows:
            is_own = own_state and kind.startswith("optimizer.")
            if part.spec is not None:
                # All members have it.
                if (share := part if is_own else shares.get(part.name)) is None:
                    continue
                values = part.spec.flatten(values)
                if share.stop - share.start < part.stop:
                    values = values[share.start : share.stop]
                part = share
            whose = f"@{hvd.rank()}" if is_own and not is_first else copy
            own.append(self.range_of(kind + whose, part, values))
        if is_first and not copy:
            # Buffers, and extra states that are tensors, for those who load weights alone; each rank's come below.
            written_here = filter(self._writes, self._buffers)
            own += [_of_buffer(f"weights/{part.name}", part.tensor) for part in written_here]
            for name, value in extra.items():
                if isinstance(value, Tensor):
                    own.append(_of_buffer(f"weights/{name}.{EXTRA}" if name else f"weights/{EXTRA}", value))
        if not alone:
            number = self._grid.number % (self._grid.replicas * self._grid.tensor)
            own += [_of_buffer(f"buffers@{number}/{name}", one) for name, one in self._own_buffers.items()]
        checked = _checked({**state, "state": kept})
        of_parts = {part.name: checked["state"].get(number, {}) for number, part in stepped}
        values_of = plain_values(checked, of_parts)
        if self.is_split:
            check_split(values_of)
        return own, {"optimizer": values_of if is_first or own_state or self.layout else None}

    def _writes(self, part: Part) -> bool:
        """Whether this stage and part of tensor parallelism write elements: each part its slice of a cut tensor, the first part
        those that all have; the first stage those of a tied tensor."""
        mine = part.name in self._mine or id(part.tensor) not in self._names
        return mine and (self._grid.part == 0 or cut_of(part.tensor) is not None)

    def _shares_of(self, members: Sequence[int]) -> dict[str, Part]:
        """The elements that this rank writes of parameters that all members have whole: about as many in all as the others."""
        parts = (part for part in (*self._parameters, *self.parts) if part.spec is not None)
        whole = {part.name: part for part in parts if self._writes(part)}
        shares = {}
        if hvd.rank() in members:
            place, total, reached = members.index(hvd.rank()), sum(part.stop for part in whole.values()), 0
            edges = total * place // len(members), total * (place + 1) // len(members)
            for name, part in sorted(whole.items()):  # ranks may have them in another order
                start, stop = (min(max(edge - reached, 0), part.stop) for edge in edges)
                reached += part.stop
                if start < stop:
                    map_tensors(part.tensor, f"weights[{name!r}]", stored)
                if start < stop or (not part.stop and place == 0):
                    shares[name] = part._replace(start=start, stop=stop)
        return shares


def own_buffers(snapshot: Snapshot, model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a snapshot has of this rank, by their names there, but for those that it has cut into other parts."""
    own, same_parts = snapshot.own_buffers, snapshot.manifest.layout.tensor == current().tensor
    buffers = ((f"{own}/{name}", one) for name, one in model.named_buffers())
    there = snapshot.manifest.tensors
    return {name: one for name, one in buffers if name in there and (same_parts or cut_of(one) is None)}


def divided(entries: Mapping[str, Any], *shapes: torch.Size) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an optimizer keeps of a parameter: plain values, and tensors of these shapes by kind, whose places are None there."""
    plain, tensors = dict(entries), dict[str, Tensor]()
    for key, value in entries.items():
        if isinstance(value, Tensor) and not not_stored(value) and value.shape in shapes and _is_kind(key):
            plain[key], tensors[f"optimizer.{key}"] = None, value
    return plain, tensors


def plain_values(state: Mapping[str, Any], plain: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The plain values of an optimizer: of parameters, by name, and what else is in its state dict."""
    others = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
    more = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": plain, "others": others, "more": more}


@functools.cache
def _is_kind(key: Any) -> bool:
    """Whether an entry of an optimizer's state may have the elements of a parameter, and a name in the manifest."""
    return isinstance(key, str) and key not in COUNTERS and key.isprintable() and not {"/", "@"} & set(key)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the wrapped optimizer. Raises Wrong unless files can hold it, and ``load_state_dict`` can load it."""
    own = {name: value for name, value in given.items() if name not in _OF_A_RANK}
    state: dict[str, Any] = map_tensors(own, "optimizer", stored)
    try:
        OptimizerState.check(state, "optimizer")
    except ValueError as error:
        raise Wrong(str(error).replace("optimizer cannot be loaded", "optimizer")) from None
    return state


def _of_buffer(name: str, buffer: Tensor) -> Range:
    return Range.of(name, map_tensors(buffer, name, stored), changing=True)


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of parameter groups, such as the learning rate."""
    of_parameters = ("params", "param_names")
    return [{key: value for key, value in group.items() if key not in of_parameters} for group in groups]


def check_split(values: Mapping[str, Any]) -> None:
    """Raises Wrong where other ranks, stages or parts could not resume with the plain values of a split optimizer."""
    odd = [ascii(key)[:60] for key in (*values["others"], *values["more"])]
    if odd:
        raise Wrong(f"optimizer: it has the entry {min(odd)}, which is not of a parameter: {NOT_SPLIT}")
    for name, entries in values["state"].items():
        for key, value in entries.items():
            if not is_single(value) or (isinstance(value, Tensor) and value.numel() != 1):
                raise Wrong(
                    f"optimizer.state[{shown(name)}].{key} is {described(value)}, and must be one number, or have one for each of "
                    f"the parameter's elements: {NOT_SPLIT}"
                )
