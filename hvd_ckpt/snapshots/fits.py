"""Comparison of a snapshot with the model and optimizer that resume from it.

Hashes show that a snapshot is undamaged, but not that it belongs to this model. PyTorch loads the state of another model or
optimizer, and fails in the next step. So names and shapes are compared before anything is used.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.snapshots.model import EXTRA, ModelTensors, check_split
from hvd_ckpt.snapshots.ranges import OTHER_MODEL
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import TensorMetadata
from hvd_ckpt.snapshots.state import optimizer_of
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.states import described, is_number, is_single


def check_fits(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises Wrong unless weights, buffers and optimizer state are of this model and optimizer, by names and shapes.

    Args:
        snapshot: that :func:`.state.check_state` has passed.
        model: the model that will have these weights; in a pipeline stage, those of its blocks.
        optimizer: optimizer of the model, distributed or not.
    """
    names, in_stages = ModelTensors(model, optimizer), hasattr(model, "_first_names")
    here = {name: names.whole_of(tensor) for name, tensor in names.tensors.items()}
    buffers = {name: TensorMetadata.of(one.dtype, TensorSpec.of(one)) for name, one in model.named_buffers()}
    for name in here:
        if not {f"weights/{name}", f"weights/{snapshot.aliases.get(name)}"} & snapshot.tensors.keys():
            raise Wrong(f"weights has no {shown(name)}: {OTHER_MODEL}")
    own = buffers_kind(snapshot)
    given = [(*name.partition("/")[::2], there) for name, there in snapshot.tensors.items()]
    replicas = snapshot.replicated["replicas"] or {"buffers": {}}
    for of_replica in replicas["buffers"].values():
        given += [
            (own, name, TensorMetadata.of(one.dtype, TensorSpec.of(one))) for name, one in of_replica.items()
        ]
    for kind, name, there in given:
        if "@" in kind and kind != own:  # another rank's
            continue
        known = buffers.get(name) if kind == own else here.get(names.aliases.get(name, name))
        if known is None and (in_stages or name.rpartition(".")[2] == EXTRA):
            continue  # a snapshot has the tensors of the whole model, and a stage those of its blocks
        if known is None:
            raise Wrong(f"{kind} has {shown(name)}: {OTHER_MODEL}")
        # A run may resume in another precision: loading converts floating point numbers.
        floats = there.torch_dtype.is_floating_point and known.torch_dtype.is_floating_point
        alike = floats or there.dtype == known.dtype or kind.startswith("optimizer.")
        if there.size != known.size or not alike:
            raise Wrong(f"{kind}[{shown(name)}] is {there}, and must be {known}: {OTHER_MODEL}")
    _check_groups(snapshot, names, in_stages)
    check_optimizer(snapshot, names, optimizer)


def buffers_kind(snapshot: Snapshot) -> str:
    """The kind of the buffers that this rank had."""
    grid, tensor = current(), snapshot.layout.tensor
    return f"buffers@{grid.replica * tensor + (grid.part if grid.tensor == tensor else 0)}"


# ------------------------------------------------------------------------------------ the optimizer


def _check_groups(snapshot: Snapshot, names: ModelTensors, in_stages: bool) -> None:
    here, there = names.groups(), snapshot.replicated["groups"]
    if len(here) != len(there):
        raise Wrong(f"optimizer has {len(there)} parameter groups, and there are {len(here)} here")
    if in_stages or snapshot.layout.pipeline_stages > 1:  # where groups have the parameters of one stage
        return
    for at, (own, theirs) in enumerate(zip(here, there)):
        for name in {*own} ^ {*theirs}:
            where = "there and not here" if name in theirs else "here and not there"
            raise Wrong(f"optimizer.param_groups[{at}]: parameter {shown(name)} is {where}")


def optimizer_values(snapshot: Snapshot, wanted: Iterable[str], copy: str = "") -> dict[str, Any]:
    """The plain values that an optimizer keeps of these parameters, by name, and those of none.

    Args:
        copy: whose, if ranks had weights of their own: such as ``"@3"``; by default rank 0's.

    Raises:
        SnapshotError: a file is damaged, or no longer there.
        Wrong: no rank has values of a parameter.
    """
    missing, grid = set(wanted), current()
    found: dict[str, Any] = {"state": {}}
    of_tensor = snapshot.manifest.by_tensor
    candidates = [int(copy[1:] or 0)]
    if not snapshot.layout.apart and grid.replica < snapshot.replicas:
        candidates.insert(0, snapshot.number_of(grid.replica))  # this rank's file is small, and has been read
    # Then the ranks with elements of a parameter, and at last all.
    candidates += [rank for name in missing for *_, rank in of_tensor.get(f"weights{copy}/{name}", ())]
    for rank in dict.fromkeys([*candidates, *range(snapshot.ranks)]):
        if not missing and "more" in found:
            break
        values = optimizer_of(snapshot, rank)
        if values is None:
            continue
        found.setdefault("others", values.others)
        found.setdefault("more", values.more)
        found["state"].update({name: values.state[name] for name in missing & values.state.keys()})
        missing -= values.state.keys()
    if missing:
        raise Wrong(f"it has no optimizer state of {shown(min(missing))}: {OTHER_MODEL}")
    return found


def check_optimizer(snapshot: Snapshot, names: ModelTensors, optimizer: torch.optim.Optimizer) -> None:
    """Raises Wrong unless the state in the snapshot fits the optimizer: names and shapes of its entries."""
    parts, there = names.parts(), snapshot.tensors
    values = optimizer_values(snapshot, {part.name for part in parts})
    if names.is_split:
        check_split(values)
    elif snapshot.replicated["groups"] != names.groups():
        _check_order(values["state"])
    for part, expected in zip(parts, state_after_a_step(optimizer)):
        kept, place = values["state"][part.name], f"optimizer.state[{shown(part.name)}]"
        for key, value in expected.items() if kept else ():
            if key not in kept:
                raise Wrong(f"{place} has no {key}, which this optimizer with its options needs")
            if not isinstance(value, Tensor):
                continue
            entry = there.get(f"optimizer.{key}/{part.name}", kept[key])
            if isinstance(entry, TensorMetadata):
                fits = value.dim() > 0 or not entry.size
                fits &= entry.torch_dtype.is_complex == value.is_complex()
            elif isinstance(entry, Tensor):
                fits = entry.shape == value.shape and entry.is_complex() == value.is_complex()
            else:  # a count of steps may be a number
                fits = value.dim() == 0 and is_number(entry)
            if not fits:
                said = entry if isinstance(entry, TensorMetadata) else described(entry)
                raise Wrong(f"{place}.{key} is {said}, and must be {described(value)}")


def _check_order(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Wrong where the state of a parameter may be about others, too, whose order it then has."""
    # LBFGS keeps vectors of all parameters, one behind the other, with the first.
    for name, entries in state.items():
        for key, value in entries.items():
            if not is_single(value):
                raise Wrong(
                    f"optimizer.state[{shown(name)}].{key} is {described(value)}, which may be in the order of the parameters, and "
                    "this order is another one here"
                )


def state_after_a_step(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter that it steps, after a step, as tensors without values."""
    # A shallow copy has the methods and settings of the optimizer. Its state and groups are other ones, so
    # that the optimizer's own stay untouched.
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if type(value) in (list, dict, set):  # a class of one's own may change them
            twin.__dict__[name] = copy.copy(value)
    twin.state = defaultdict(dict)
    kind = getattr(optimizer, "wrapped_class", type(optimizer))
    parameters = []
    for group, stepped in zip(optimizer.param_groups, stepped_parameters(optimizer)):
        options = {name: value for name, value in group.items() if name != "params"}
        # Steps of one tensor at a time, which also run on the meta device.
        options.update({name: False for name in ("fused", "foreach", "capturable") if name in options})
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = float(options["lr"])
        alike = [
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").requires_grad_()
            for parameter in stepped
        ]
        for parameter in alike:
            parameter.grad = torch.empty_like(parameter)
        parameters += alike
        twin.param_groups = [{**options, "params": alike}]
        # Some read a value, when they have made all that they keep. LBFGS needs a closure.
        with contextlib.suppress(Exception):
            # The step of the wrapped class: that of a DistributedOptimizer would communicate.
            kind.step(twin)
    if kind.__module__.partition(".")[0] == "torch":
        return [twin.state[parameter] for parameter in parameters]
    # Entries of a class of one's own may come, go and grow, but for those that have an element for each of the parameter's.
    return [
        {
            name: value
            for name, value in twin.state[parameter].items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }
        for parameter in parameters
    ]
