"""The tensors of a model and of its optimizer: their names in a snapshot, and which elements of them this rank has."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.collectives import ranks_of
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange, ranges_of
from hvd_ckpt.sharding.state_view import COUNTERS
from hvd_ckpt.snapshots.ranges import Elements, Range
from hvd_ckpt.snapshots.schema import TensorMetadata
from hvd_ckpt.snapshots.tensors import check_tensor, map_tensors
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.states import NOT_SPLIT, OptimizerState, described, is_single

# Of the state of a DistributedOptimizer: not the wrapped optimizer's, and elsewhere in a snapshot.
_OF_A_RANK = ("pieces", "stage", "ranks", "rank", "master_weights", "local_sgd")
EXTRA = "_extra_state"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all names that they have in ``state_dict()``, which is refused where parameters are split."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


class Part(NamedTuple):
    """The elements of a parameter that an optimizer steps here: their state is that of ``name`` in a snapshot."""

    name: str
    target: ShardRange
    parameter: Tensor


class ModelTensors:
    """The tensors of a model by the names that they have in a snapshot: for tied ones the first.

    Args:
        model: whole, sharded or in pipeline stages.
        optimizer: that steps it, distributed or not; None if only weights matter.

    Attributes:
        tensors: parameters and buffers of this process, by name.
        aliases: further names of tied tensors of the whole model, and the name that each is stored under.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model, self._optimizer, self._grid = model, optimizer, current()
        self.layout: Any = _layout_of(optimizer)
        # Tied tensors are one, by which they are found. In pipeline stages, those of other stages are
        # freed, so the model has noted the names.
        known = getattr(model, "_first_names", None)
        named = named_tensors(model)
        first: dict[int, str] = {}
        if known is None:
            known = {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}
        self.aliases = {name: stored for name, stored in known.items() if stored != name}
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._mine: set[str] = set()  # of several stages that have a tied tensor, the first writes it
        self._whole: dict[tuple[int, torch.dtype], tuple[TensorMetadata, int]] = {}
        self._named, self._stepped, self._parts = named, list[Any](), list[Part]()
        for name, tensor in named.items():
            self.tensors.setdefault(known[name], tensor)
            self._names.setdefault(id(tensor), known[name])
            if known[name] == name:
                self._mine.add(name)

    def renewed(self) -> ModelTensors:
        """This object if the model has the same tensors still, else a new one. Most of a save is to find out how they lie."""
        named = named_tensors(self._model)
        same = len(named) == len(self._named) and all(
            one is other and name == known
            for (name, one), (known, other) in zip(named.items(), self._named.items())
        )
        same = same and self.layout is _layout_of(self._optimizer)
        return self if same else ModelTensors(self._model, self._optimizer)

    def whole_of(self, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorMetadata:
        """The whole tensor of which this process has a part, or of its state of another dtype."""
        return self._place(tensor, dtype or tensor.dtype)[0]

    def _place(self, tensor: Tensor, dtype: torch.dtype) -> tuple[TensorMetadata, int]:
        """The whole tensor, and the first element there of this process's part."""
        key = id(tensor), dtype
        if key not in self._whole:
            index = None if self.layout is None else self.layout.index(tensor)
            spec = TensorSpec.of(tensor) if index is None else self.layout.specs[index]
            whole = TensorMetadata.of(dtype, spec, cut_of(tensor), self._grid.tensor)
            self._whole[key] = whole, whole.place_of(self._grid.part)[0]
        return self._whole[key]

    def elements(self, kind: str, name: str, tensor: Tensor, start: int, stop: int) -> Elements:
        """Elements ``start`` to ``stop`` of this process's part of a tensor, to read them of a snapshot."""
        whole, first = self._place(tensor, tensor.dtype)
        return Elements(f"{kind}/{name}", first + start, first + stop, whole)

    def is_sharded(self, tensor: Tensor) -> bool:
        """Whether ranks have shards of it, those of :attr:`weight_pieces`."""
        return self.layout is not None and self.layout.index(tensor) is not None

    @property
    def is_split(self) -> bool:
        """Whether the optimizer's state is split over ranks, stages or parts."""
        return self.layout is not None or self._grid.model_parallel_size > 1

    def weight_pieces(self) -> Iterator[tuple[str, Tensor, int, int, Tensor]]:
        """This rank's shards of the exact weights: name, parameter, first and last + 1 element, and values."""
        if self.layout is None:
            return
        number = {name: index for index, name in enumerate(self.layout.names)}
        for name, start, stop, values in self._optimizer.weight_pieces():
            parameter = self.layout.parameters[number[name]]
            yield self._names.get(id(parameter), name), parameter, start, stop, values

    def parts(self) -> list[Part]:
        """What the optimizer steps, in the order of its groups."""
        optimizer = self._optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stepped = parameters if self.layout is None else list(optimizer.pieces)
        if len(stepped) != len(self._stepped) or any(
            one is not other for one, other in zip(stepped, self._stepped)
        ):
            self._stepped, self._parts = stepped, self._found_parts(parameters)
            self._whole.clear()
        return self._parts

    def _found_parts(self, parameters: Sequence[Tensor]) -> list[Part]:
        optimizer = self._optimizer
        if not hasattr(optimizer, "parameter_names"):  # not distributed
            ranges = [
                ShardRange(self._names[id(one)], 0, one.numel(), TensorSpec.of(one), True)
                for one in parameters
            ]
            return [Part(target.name, target, one) for target, one in zip(ranges, parameters)]
        by_name = {name: parameter for parameter, name in optimizer.parameter_names.items()}
        return [
            Part(self._names.get(id(by_name[target.name]), target.name), target, by_name[target.name])
            for target in ranges_of(optimizer)
        ]

    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        known = getattr(self._optimizer, "parameter_names", {})
        return [
            [self._names.get(id(parameter)) or known[parameter] for parameter in group["params"]]
            for group in self._optimizer.param_groups
        ]

    def _writes(self, name: str, tensor: Tensor) -> bool:
        """Whether this stage and part write a tensor: each part its slice of a cut one, the first part those that all have."""
        mine = name in self._mine or id(tensor) not in self._names
        return mine and (self._grid.part == 0 or cut_of(tensor) is not None)

    # -------------------------------------------------------------------------------- saving

    def saved(
        self, average: Any, extra: Mapping[str, Any], alone: bool = False
    ) -> tuple[list[Range], dict[str, Any]]:
        """The ranges that this rank writes, and the plain values of its optimizer: by name, and others.

        Ranks that have equal tensors share the writing.

        Args:
            average: averages of the weights, or None.
            extra: the extra states of modules.
            alone: write all that this rank has, as if there were no others.

        Raises:
            Wrong: no run could resume from the state of the optimizer.
        """
        optimizer, rank = self._optimizer, hvd.rank()
        members = ranks_of(optimizer.process_set)
        if alone:
            members = [rank]
        elif not optimizer.is_local and members[0] != 0:
            members = [0]  # a process set without rank 0
        elif optimizer.reduces_updates:
            members = members[:1]  # whose state is that of its own gradients
        copy = f"@{members[0]}" if optimizer.is_local and members[0] and not alone else ""
        is_first = rank == members[0]
        parts = self.parts()
        shares = self._shares(parts, members)
        own: list[Range] = []

        def add(kind: str, name: str, tensor: Tensor, start: int, values: Tensor) -> None:
            whole, first = self._place(tensor, values.dtype)
            place = first + start
            own.append(Range(f"{kind}{copy}/{name}", place, place + values.numel(), whole, values))

        def add_share(kind: str, name: str, tensor: Tensor, spec: TensorSpec, values: Tensor) -> None:
            if name in shares:
                start, stop = shares[name]
                add(kind, name, tensor, start, spec.flatten(values)[start:stop])

        for name, tensor in self.tensors.items():
            if not self._writes(name, tensor) or (self.is_sharded(tensor) and tensor.numel()):
                continue
            check_tensor(tensor, f"weights[{name!r}]")
            if isinstance(tensor, nn.Parameter):
                add_share("weights", name, tensor, TensorSpec.of(tensor), tensor)
            elif is_first and not copy:
                own.append(_of_buffer(f"weights/{name}", tensor, self.whole_of(tensor)))
        if self.layout is not None and optimizer.shard_stage < 3:
            optimizer.sharding.store.sync_from_model()  # other tensors in the parameters' place
        for name, tensor, start, stop, values in self.weight_pieces():
            if start < stop and self._writes(name, tensor):
                add("weights", name, tensor, start, values)
        if (
            is_first and not copy
        ):  # extra states are each rank's; tensors are here as well, for those who load weights alone
            for name, state in extra.items():
                if isinstance(state, Tensor):
                    named = f"weights/{name}.{EXTRA}" if name else f"weights/{EXTRA}"
                    own.append(_of_buffer(named, state))

        state = self._checked_state()
        averages = {} if average is None else average.state_dict()["averages"]
        masters = state.pop("master_weights")
        plain: dict[str, dict[str, Any]] = {}
        for number, (name, (_, start, stop, spec, whole), tensor) in enumerate(parts):
            if not self._writes(name, tensor) or (start == stop and not whole):
                continue
            kept = plain.setdefault(name, {})
            shape = spec.shape if whole else (stop - start,)
            others = ("master_weights", masters), ("average", averages)
            found = [(kind, of_kind[number]) for kind, of_kind in others if number in of_kind]
            for key, value in state["state"].pop(number, {}).items():
                if isinstance(value, Tensor) and value.shape == shape and _is_kind(key):
                    kept[key] = None  # keeps the place of the entry
                    found.append((f"optimizer.{key}", value))
                else:
                    kept[key] = value
            for kind, tensor_values in found:
                if whole:
                    add_share(kind, name, tensor, spec, tensor_values)
                else:
                    add(kind, name, tensor, start, tensor_values)
        if not alone:
            number = self._grid.number % (self._grid.replicas * self._grid.tensor)
            own += [
                _of_buffer(f"buffers@{number}/{name}", buffer) for name, buffer in self._model.named_buffers()
            ]
        no_parameters = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        more = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        kept_plain = {"state": plain, "others": no_parameters, "more": more}
        if self.is_split:
            check_split(kept_plain)
        return own, {"optimizer": kept_plain if is_first or self.layout else None}

    def _shares(self, parts: Sequence[Part], members: Sequence[int]) -> dict[str, tuple[int, int]]:
        """The elements that this rank writes of each parameter that all members have whole, about as many as the others."""
        sizes = {
            name: 0 if self.is_sharded(one) else one.numel()
            for name, one in self.tensors.items()
            if isinstance(one, nn.Parameter)
        }
        sizes.update({part.name: part.parameter.numel() for part in parts if part.name not in sizes})
        shares: dict[str, tuple[int, int]] = {}
        if hvd.rank() in members:
            place, total, reached = members.index(hvd.rank()), sum(sizes.values()), 0
            edges = total * place // len(members), total * (place + 1) // len(members)
            for name, size in sorted(sizes.items()):  # ranks may have them in another order
                start, stop = (min(max(edge - reached, 0), size) for edge in edges)
                reached += size
                if start < stop or (not size and place == 0):
                    shares[name] = start, stop
        return shares

    def _checked_state(self) -> dict[str, Any]:
        """The state of the wrapped optimizer, of which the entries can be taken out."""

        def checked(tensor: Tensor, place: str) -> Tensor:
            check_tensor(tensor, place)
            return tensor

        given = self._optimizer.state_dict()
        own = {name: value for name, value in given.items() if name not in _OF_A_RANK}
        state: dict[str, Any] = map_tensors(own, "optimizer", checked)
        try:
            OptimizerState.check(state, "optimizer")
        except ValueError as error:
            raise Wrong(str(error).replace("optimizer cannot be loaded", "optimizer")) from None
        return {**state, "master_weights": given.get("master_weights", {})}


def _layout_of(optimizer: Any) -> Any:
    """The layout of shards; None for an optimizer that has none."""
    return optimizer.sharding.layout if getattr(optimizer, "shard_stage", 0) > 0 else None


@functools.cache
def _is_kind(key: str) -> bool:
    """Whether an entry of an optimizer's state may have the elements of a parameter, and a name in the manifest."""
    return key not in COUNTERS and key.isprintable() and not {"/", "@"} & set(key)


def _of_buffer(name: str, buffer: Tensor, whole: TensorMetadata | None = None) -> Range:
    check_tensor(buffer, name)
    spec = TensorSpec.of(buffer)
    whole = whole or TensorMetadata.of(buffer.dtype, spec)
    place = whole.place_of(current().part)
    return Range(name, *place, whole, spec.flatten(buffer), changing=True)


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
