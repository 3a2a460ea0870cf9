"""Validation of a snapshot's state against the model and optimizer that resume from it, and resharding of the optimizer's state.

Hashes show that a snapshot is undamaged, but not that it belongs to this model. PyTorch loads the state of another model or
optimizer, and fails in the next step. So names and shapes are compared before anything is used.

Resharding: each rank maps the files with elements of its shards (of weights and of the optimizer's state), and copies
only these elements. So a job of any size and stage resumes from any other, and no rank holds more than its shards.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange, ranges_of
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.snapshots.files import naming
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    ShardingMetadata,
    ShardMetadata,
    shard_file,
)
from hvd_ckpt.snapshots.slices import Piece, Slices, local_spec
from hvd_ckpt.utils.cuts import Cut
from hvd_ckpt.utils.schema import Wrong, first_error, shown
from hvd_ckpt.utils.states import NOT_SPLIT, SplitState, described, is_number

FLAT = 7  # elements of a shard that stands for any
OTHER_MODEL = "the snapshot is of another model"


class OptimizerShard(SplitState):
    """The structure of a rank's state in shards: the optimizer's, and master weights and averages where a run has such."""

    master_weights: dict[int, Tensor] = Field(default_factory=dict)
    averages: dict[int, Tensor] = Field(default_factory=dict)


# ------------------------------------------------------------------------------------ whole state


def check_tensors(
    given: Mapping[str, Tensor], known: Mapping[str, Tensor], place: str, complete: bool
) -> None:
    """Raises Wrong unless tensors have names, shapes and kinds of numbers of those that are known.

    Args:
        complete: whether all of the known ones must be given.
    """
    odd = sorted(set(given) - set(known)) or sorted(set(known) - set(given)) * complete
    if odd:
        there = "has no" if odd[0] in known else "has"
        raise Wrong(f"{place} {there} {shown(odd[0])}: {OTHER_MODEL}")
    for name, value in given.items():
        expected = known[name]
        # A run may resume in another precision: loading converts floating point numbers.
        floats = value.is_floating_point() and expected.is_floating_point()
        if value.shape != expected.shape or not (floats or value.dtype == expected.dtype):
            raise Wrong(
                f"{place}[{shown(name)}] is {described(value)}, and must be {described(expected)}: {OTHER_MODEL}"
            )


def check_averages(averages: Mapping[str, Tensor], place: str, model: nn.Module) -> None:
    """Raises Wrong unless averages are of the model's parameters, and of all that are trained."""
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name in averages
    }
    check_tensors(averages, parameters, place, True)


def check_optimizer(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, sharded: bool = False
) -> None:
    """Raises Wrong unless a state of valid structure fits the optimizer: its groups, and names and shapes of its entries.

    Args:
        state: state of whole parameters.
        sharded: whether the optimizer has shards, some of them on this rank: then the names of entries are looked at that it keeps
            of each.
    """
    there = state["param_groups"]
    if sharded:
        of_shards = _after_a_step(optimizer, flat=True)
        common = (
            dict.fromkeys(name for name in of_shards[0] if all(name in entries for entries in of_shards))
            if of_shards
            else {}
        )
        for number, kept in state["state"].items():
            _check_entries(kept, common, f"optimizer.state[{number}]")
        return
    if [len(group["params"]) for group in optimizer.param_groups] != [
        len(group["params"]) for group in there
    ]:
        counts = " and ".join(str(len(group["params"])) for group in there)
        raise Wrong(f"optimizer has {counts} parameters in its groups: {OTHER_MODEL}")
    numbers = [number for group in there for number in group["params"]]
    for expected, number in zip(_after_a_step(optimizer), numbers):
        _check_entries(state["state"].get(number), expected, f"optimizer.state[{number}]")


def _check_entries(
    kept: Mapping[str, Any] | None, expected: Mapping[str, Any], place: str, size: int | None = None
) -> None:
    """Raises Wrong unless what an optimizer keeps of a parameter, if anything, has the names and shapes that are expected.

    Args:
        size: size of a shard, in place of FLAT elements.
    """
    for name, value in expected.items() if kept else ():
        assert kept is not None
        if name not in kept:
            raise Wrong(f"{place} has no {name}, which this optimizer with its options needs")
        if not isinstance(value, Tensor):
            continue
        if size is not None and value.shape == (FLAT,):
            value = torch.empty(size, dtype=value.dtype, device="meta")
        entry = kept[name]
        if isinstance(entry, Tensor):
            fits = entry.shape == value.shape and entry.is_complex() == value.is_complex()
        else:  # a count of steps may be a number
            fits = value.dim() == 0 and is_number(entry)
        if not fits:
            raise Wrong(f"{place}.{name} is {described(entry)}, and must be {described(value)}")


def _after_a_step(optimizer: torch.optim.Optimizer, flat: bool = False) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter after a step, as tensors without values.

    Args:
        flat: as if each parameter had one dimension with ``FLAT`` elements.
    """
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
            torch.empty(
                FLAT if flat else parameter.shape, dtype=parameter.dtype, device="meta"
            ).requires_grad_()
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


# ------------------------------------------------------------------------------------ shards


def read_weights(snapshot: Snapshot, wanted: Sequence[ShardRange]) -> list[tuple[str, int, int, Tensor]]:
    """Weights that have these elements: name, first and last + 1 element, and values (1-D), mapped from files where they can be.

    For weights in shards, only files with some of the elements are read. All files with a part of a parameter are read if it is
    cut again or its elements lie in another order.

    Args:
        snapshot: whose names and shapes are those of the elements, see :func:`check_tensors`.

    Raises:
        SnapshotError: a shard is damaged, or no longer there.
    """
    files, sharding = snapshot.files, snapshot.sharding
    in_shards = {} if files is None else files.weights_in_shards
    aliases = {} if files is None else files.manifest.aliases
    pieces: list[tuple[str, int, int, Tensor]] = []
    by_name: dict[str, list[ShardRange]] = {}
    for elements in wanted:
        stored = aliases.get(elements.name, elements.name)
        if stored in in_shards:
            by_name.setdefault(stored, []).append(elements)
        else:
            whole = snapshot.slice_of(elements.name, snapshot.first_weights[stored])
            pieces.append((elements.name, 0, elements.spec.numel, elements.spec.flatten(whole)))
    if not by_name:
        return pieces
    assert files is not None and sharding is not None and sharding.weights is not None
    cuts = {
        stored: snapshot.cuts[ranges[0].name]
        for stored, ranges in by_name.items()
        if ranges[0].name in snapshot.cuts
    }
    slices = Slices(sharding, cuts)
    anew: dict[str, list[Piece]] = {
        stored: []
        for stored, ranges in by_name.items()
        if slices.is_cut_anew(stored)
        or any(elements.spec != local_spec(in_shards[stored], cuts.get(stored)) for elements in ranges)
    }
    for rank, shards in enumerate(sharding.weights):
        needed = {
            shard.name
            for shard in shards
            if shard.name in anew
            or any(slices.takes(shard, rank, elements) for elements in by_name.get(shard.name, ()))
        }
        for shard, values in files.weight_shards(rank) if needed else ():
            if shard.name in anew:
                anew[shard.name].append((rank % sharding.tensor, shard.offset, shard.stop, values))
            elif shard.name in needed:
                pieces += [
                    (elements.name, shard.offset, shard.stop, values) for elements in by_name[shard.name]
                ]
    for stored, parts in anew.items():
        for elements in by_name[stored] if parts else ():  # one without elements has no shards
            flat = elements.spec.flatten(slices.whole(stored, parts))
            pieces.append((elements.name, 0, elements.spec.numel, flat))
    return pieces


def check_sharding(
    sharding: ShardingMetadata, specs: Mapping[str, TensorSpec], cuts: Mapping[str, Cut] | None = None
) -> None:
    """Raises Wrong unless what was sharded is the model's and the optimizer's: names, sizes, order in memory.

    Args:
        specs: specs of the optimizer's parameters, by name.
        cuts: how tensor parallelism cuts them here.
    """
    stored = {shard.name for shards in sharding.optimizer for shard in shards}
    for name, here in specs.items():
        there = sharding.parameters.get(name)
        if there is None or (here.numel and name not in stored):
            raise Wrong(f"sharding has no optimizer state of {shown(name)}: {OTHER_MODEL}")
        spec = local_spec(there, (cuts or {}).get(name))
        if (spec.shape, tuple(spec.stride)) != (here.shape, tuple(here.stride)):
            raise Wrong(
                f"sharding.parameters[{shown(name)}] has size {list(spec.shape)} and strides {list(spec.stride)}, and must have "
                f"size {list(here.shape)} and strides {list(here.stride)}: {OTHER_MODEL}"
            )


def state_of_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The optimizer's state of a shard of each parameter after a step, for :func:`read_shards`.

    Args:
        optimizer: as it was made, or distributed: then of the parameters of which this rank has a shard.
    """
    if isinstance(optimizer, ReducedOptimizer):
        shard_names = [elements.name for elements in ranges_of(optimizer)]
    else:
        names = {parameter: name for name, parameter in model.named_parameters()}
        shard_names = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(shard_names, _after_a_step(optimizer, flat=True)))


def read_shards(
    snapshot: Snapshot,
    wanted: Sequence[ShardRange],
    expected: Mapping[str, Mapping[str, Any]],
    groups: int,
    cuts: Mapping[str, Cut] | None = None,
) -> list[dict[str, Any]]:
    """The optimizer state of all ranks that had elements of this rank's, as their ``state_dict()``; mapped from the files.

    Args:
        snapshot: a snapshot of a sharded run.
        wanted: result of :func:`hvd_ckpt.sharding.state.ranges_of`.
        expected: result of :func:`state_of_shards`.
        groups: parameter groups of the optimizer.
        cuts: how tensor parallelism cuts its parameters, by their names there.

    Raises:
        SnapshotError: a shard is damaged, no longer there, or not of such an optimizer.
    """
    sharding, files = snapshot.sharding, snapshot.files
    assert sharding is not None and files is not None
    by_name = {elements.name: elements for elements in wanted}
    slices = Slices(sharding, cuts or {})
    ranks = [
        rank
        for rank, shards in enumerate(sharding.optimizer)
        if any(shard.name in by_name and slices.takes(shard, rank, by_name[shard.name]) for shard in shards)
    ]
    parts = []
    for rank in ranks or [0]:  # any has the parameter groups
        shards, name = sharding.optimizer[rank], shard_file(rank)
        part = files.state(name, mmap=True)
        with naming(files.path, name):
            try:
                check_shard(part, shards, expected, groups)
            except Wrong as error:
                raise Wrong(f"{error}: {DAMAGED}, or give the settings that the run had") from None
        parts.append({**part, "pieces": slices.note(rank, part, by_name)})
    anew = slices.cut_anew(parts[0]["param_groups"])
    return parts if anew is None else [*parts, anew]


def check_shard(
    part: Any, shards: Sequence[ShardMetadata], expected: Mapping[str, Mapping[str, Any]], groups: int
) -> None:
    """Raises Wrong unless it is a rank's shard of the state of such an optimizer."""
    checked = check_split(part, shards)
    if len(checked.param_groups) != groups:
        raise Wrong(
            f"param_groups are not of the {len(shards)} shards that the manifest has, in {groups} groups"
        )
    for number, kept in checked.state.items():
        shard = shards[number]
        _check_entries(kept, expected.get(shard.name, {}), f"state[{number}]", shard.size)
    for entry, values in (("master_weights", checked.master_weights), ("averages", checked.averages)):
        for number, value in values.items():
            fits = number in range(len(shards)) and value.shape == (shards[number].size,)
            if not fits or not value.is_floating_point():
                raise Wrong(f"{entry}[{number}] is {described(value)}, which is not that of its shard")


def check_split(part: Any, shards: Sequence[ShardMetadata]) -> OptimizerShard:
    """Raises Wrong unless it is the state of these shards, of any optimizer, from which other ranks can take elements."""
    try:
        checked = OptimizerShard.model_validate(part)
    except ValidationError as error:
        raise Wrong(first_error(error)) from None
    numbers = [number for group in checked.param_groups for number in group["params"]]
    if sorted(numbers) != list(range(len(shards))):
        raise Wrong(
            f"param_groups are not of the {len(shards)} shards that the manifest has, in {len(checked.param_groups)} groups"
        )
    for number, kept in checked.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.numel() not in (1, shards[number].size):
                raise Wrong(
                    f"state[{number}].{name} is {described(value)}, and must have one element or the {shards[number].size} of its "
                    f"shard of {shown(shards[number].name)}: {NOT_SPLIT}"
                )
    return checked
