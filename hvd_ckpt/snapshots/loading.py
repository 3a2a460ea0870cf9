"""Loading of a snapshot's tensors into model, optimizer and averages, with any number of ranks, stages and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.sharding.state import load, numbered
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.snapshots.fits import buffers_kind, optimizer_values
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.model import ModelTensors, Part
from hvd_ckpt.snapshots.ranges import Elements
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import DAMAGED
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.schema import Wrong


@contextmanager
def naming_snapshot(snapshot: Snapshot) -> Iterator[None]:
    """Turns an error in the content of a snapshot into one sentence, a SnapshotError."""
    try:
        yield
    except Wrong as error:
        way_out = ": give the model, optimizer and settings that it was written with, or another snapshot"
        raise SnapshotError(
            f"The snapshot '{snapshot.path}' cannot be used: {error}{'' if DAMAGED in str(error) else way_out}."
        ) from None


def reading_weights(
    snapshot: Snapshot, model: nn.Module, optimizer: Any = None, copy: str = ""
) -> Callable[[], None]:
    """Verifies the files with weights and buffers of this process, and returns a function that copies them into the model.

    That function is collective, if the optimizer is sharded.

    Args:
        model: may be distributed already: sharded, say, or in pipeline stages.
        copy: whose weights, if ranks had their own: such as ``"@3"``; by default rank 0's.

    Raises:
        SnapshotError: a file is damaged, or no longer there.
    """
    names = ModelTensors(model, optimizer)
    there, own = snapshot.tensors, buffers_kind(snapshot)

    def wish(name: str, tensor: Tensor, start: int, stop: int) -> Elements:
        stored = name if f"weights/{name}" in there else snapshot.aliases.get(name, name)
        kind = f"weights{copy}" if isinstance(tensor, nn.Parameter) else "weights"
        if kind == "weights" and f"{own}/{name}" in there and not isinstance(tensor, nn.Parameter):
            # In this rank's own file; on other numbers of ranks, those of rank 0.
            kind = own if snapshot.replicas == current().replicas and cut_of(tensor) is None else kind
        return names.elements(kind, stored, tensor, start, stop)

    whole = [(name, tensor) for name, tensor in names.tensors.items() if not names.is_sharded(tensor)]
    pieces = list(names.weight_pieces())
    wanted = [wish(name, tensor, 0, tensor.numel()) for name, tensor in whole]
    wanted += [wish(*piece[:4]) for piece in pieces]
    with naming_snapshot(snapshot):
        values = snapshot.read(wanted)

    def copy_all() -> None:
        with torch.no_grad():
            for (_, tensor), elements in zip(whole, wanted):
                tensor.copy_(_in_shape(next(values), tensor, elements))
        if pieces or names.layout is not None:
            own = [piece[:3] for piece in optimizer.weight_pieces()]
            optimizer.load_weight_pieces((*piece, flat) for piece, flat in zip(own, values))

    return copy_all


def _in_shape(flat: Tensor, tensor: Tensor, elements: Elements) -> Tensor:
    return flat.view(tensor.shape) if elements.whole.cut is not None else elements.whole.unflatten(flat)


def load_optimizer(
    snapshot: Snapshot, names: ModelTensors, optimizer: Any, options: bool, copy: str = ""
) -> None:
    """Loads the optimizer's state, with the options of its groups or without them. Collective.

    Args:
        options: whether the optimizer's groups get the options of the snapshot, such as the learning rate, or keep theirs.
        copy: as in :func:`reading_weights`.
    """
    parts, is_sharded = names.parts(), names.layout is not None
    there = snapshot.tensors
    with errors_on_all("Snapshots: parts"), naming_snapshot(snapshot):
        values = optimizer_values(snapshot, {part.name for part in parts}, copy)
        wanted: list[Elements] = []
        places: list[tuple[dict[Any, Any], Any, Part]] = []
        state: dict[Any, Any] = {}
        masters: dict[int, Tensor] = {}
        for number, part in enumerate(parts):
            name, target, parameter = part
            if target.start == target.stop and not target.whole:
                continue
            entries = dict(values["state"][name])
            if entries:
                state[number] = entries
            kinds = [(entries, key, f"optimizer.{key}{copy}") for key in entries]
            if is_sharded and optimizer.pieces[number].has_master:
                kinds.append((masters, number, f"master_weights{copy}"))
            for place, key, kind in kinds:
                if f"{kind}/{name}" in there:
                    wanted.append(names.elements(kind, name, parameter, target.start, target.stop))
                    places.append((place, key, part))
        for (place, key, part), elements, flat in zip(places, wanted, snapshot.read(wanted, copied=True)):
            place[key] = _in_shape(flat, part.parameter, elements) if part.target.whole else flat
        groups = snapshot.replicated["options"]
        loaded: dict[str, Any] = {
            "state": {**state, **values["others"]},
            "param_groups": numbered(groups, stepped_parameters(optimizer)),
            **values["more"],
        }
        for group, own in zip(loaded["param_groups"], optimizer.param_groups):
            group.update({name: own[name] for name in ("param_names",) if name in own})
        if masters:
            loaded["master_weights"] = masters
    before = [dict(group) for group in optimizer.param_groups]
    saved = {number: dict(entries) for number, entries in state.items()}
    if is_sharded:
        load(optimizer, lambda: loaded)
        if optimizer.reducer is not None:
            optimizer.note_state_loaded()
    else:
        optimizer.load_state_dict(loaded)
        _restore_types(snapshot, names, optimizer, saved)
    for group, kept in zip(optimizer.param_groups, () if options else before):
        group.clear()
        group.update(kept)


def _restore_types(
    snapshot: Snapshot, names: ModelTensors, optimizer: Any, saved: Mapping[int, Mapping[str, Any]]
) -> None:
    """Gives state of whole parameters the types that it was saved with: PyTorch has made those of the parameters of them.

    Of parameters that had another type themselves it stays, as the run resumes in another precision.
    """
    for number, (name, _, parameter) in enumerate(names.parts()):
        weight = snapshot.tensors.get(f"weights/{name}")
        if number in saved and weight is not None and weight.torch_dtype == parameter.dtype:
            entries = optimizer.state.get(parameter, {})
            for key, value in saved[number].items():
                if key != "step" and key in entries:  # PyTorch decides the type and place of this one
                    entries[key] = _with_types_of(value, entries[key])


def _with_types_of(saved: Any, loaded: Any) -> Any:
    """The loaded value, with the tensors that have lost their type as they were saved."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        is_cast = loaded.dtype != saved.dtype and loaded.shape == saved.shape
        return saved.to(loaded.device) if is_cast else loaded
    if type(saved) is dict and type(loaded) is dict and saved.keys() == loaded.keys():
        return {name: _with_types_of(value, loaded[name]) for name, value in saved.items()}
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(map(_with_types_of, saved, loaded))
    return loaded


def load_average(average: AveragedWeights, snapshot: Snapshot, names: ModelTensors) -> None:
    """Loads the average of a snapshot; without one it begins anew, with the next update. Collective."""
    if snapshot.replicated["ema"] is None:
        return
    state = average.state_dict()
    with errors_on_all("Snapshots: average"), naming_snapshot(snapshot):
        there = snapshot.tensors
        # Of a parameter that was not trained there may be none.
        found = [
            (number, part)
            for number, part in enumerate(names.parts())
            if part.parameter.requires_grad or f"average/{part.name}" in there
        ]
        wanted = [
            names.elements("average", part.name, part.parameter, part.target.start, part.target.stop)
            for _, part in found
        ]
        values = {number: flat for (number, _), flat in zip(found, snapshot.read(wanted))}
    averages = {number: values.get(number, value) for number, value in state["averages"].items()}
    average.load_state_dict(
        {**state, "averages": averages, "n_averaged": snapshot.replicated["ema"]["n_averaged"]}
    )
