"""Loading of a snapshot's state into model and ``DistributedOptimizer``, with any number of ranks, stages and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.distributed.precision import GradScaler
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange, assembled, load_parts, ranges_of
from hvd_ckpt.snapshots.content import RunShards, named_tensors
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.random_state import set_random_state
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.resume import read_shards, read_weights
from hvd_ckpt.snapshots.schema import libraries
from hvd_ckpt.snapshots.slices import cuts_of
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.own_state import set_extra_states


@dataclass(frozen=True)
class Target:
    """The objects into which a snapshot's state is loaded.

    Attributes:
        optimizer: the ``DistributedOptimizer`` of the model.
        shards: shards of the run.
        average: average of the weights, if the run has one; ``scaler`` likewise.
    """

    model: nn.Module
    optimizer: Any
    shards: RunShards
    average: AveragedWeights | None
    scaler: GradScaler | None


def load_weights(snapshot: Snapshot, model: nn.Module, optimizer: Any, shards: RunShards) -> None:
    """Loads weights and buffers into a model that is distributed already: sharded, say, or in pipeline stages. Collective.

    Raises:
        SnapshotError: a file is damaged, or no longer there; on every rank, with the model as it was.
    """
    split: list[ShardRange] = []
    whole: dict[str, ShardRange] = {}
    tensors = named_tensors(model) if shards.sharded else {}
    if shards.splits_each:
        layout = optimizer.sharding.layout
        specs = dict(zip(layout.names, layout.specs))
        split = [
            ShardRange(name, start, stop, specs[name], False)
            for name, start, stop, _ in optimizer.weight_pieces()
        ]
    for name, tensor in tensors.items():
        if not (isinstance(tensor, nn.Parameter) and shards.splits_each):
            whole[name] = ShardRange(name, 0, tensor.numel(), TensorSpec.of(tensor), True)
    with errors_on_all("Snapshots: weights"):
        if shards.sharded:
            pieces = read_weights(snapshot, [*split, *whole.values()])
        else:
            weights = snapshot.weights
    if not shards.sharded:
        # Their names were compared. Extra state of modules is not among them.
        model.load_state_dict(weights, strict=False)
        return
    if shards.splits_each:
        optimizer.load_weight_pieces(pieces)
    by_name: dict[str, list[tuple[int, int, Tensor]]] = {}
    for name, start, stop, values in pieces:
        by_name.setdefault(name, []).append((start, stop, values))
    with torch.no_grad():
        for name, (_, start, stop, spec, _) in whole.items():
            of_tensor = by_name.get(name, [])
            flat = assembled(of_tensor, start, stop, f"weights[{name!r}]", tensors[name])
            tensors[name].copy_(spec.unflatten(flat))


def load_state(
    snapshot: Snapshot,
    expected: Mapping[str, Mapping[str, Any]],
    target: Target,
    options: bool = False,
) -> bool:
    """Loads everything except the weights. Returns whether this includes this rank's own state. Collective.

    Args:
        expected: the state that the optimizer keeps of each shard, see :func:`hvd_ckpt.snapshots.resume.state_of_shards`. To
            resume in stages from a snapshot without stages, it is the state of the whole model, in the order of its optimizer.
        target: the objects into which the state is loaded.
        options: whether the optimizer's groups get the options of the snapshot, such as the learning rate, or keep theirs.
    """
    model, optimizer, shards = target.model, target.optimizer, target.shards
    average, scaler = target.average, target.scaler
    # The optimizer's state in parts, with the name and the elements of each; None for a whole state in the order of this optimizer:
    #
    #     shards, and this rank has its own (local SGD)    its own
    #     shards                                           those that have elements of this rank's
    #     a whole state, and stages here                   the whole as one part, of which each stage takes its parameters
    parts = None
    with errors_on_all("Snapshots: parts"):
        if snapshot.sharding is not None and snapshot.replicated["optimizer"] is not None:
            pieces = snapshot.per_rank["local"]["pieces"]["optimizer"]
            parts = [{**snapshot.replicated["optimizer"], "pieces": pieces}]  # a rank's own, of local SGD
        elif snapshot.sharding is not None:
            own = ranges_of(optimizer)
            names = {shards.stored_name(elements.name): elements.name for elements in own}
            wanted = [elements._replace(name=shards.stored_name(elements.name)) for elements in own]
            cuts = {shards.stored_name(name): cut for name, cut in cuts_of(model).items()}
            parts = read_shards(snapshot, wanted, expected, len(optimizer.param_groups), cuts)
            for part in parts:
                part["pieces"] = [[names.get(name, name), *rest] for name, *rest in part["pieces"]]
        elif current().stages > 1:  # each of which has a part of what is whole there
            state = snapshot.replicated["optimizer"]
            sizes = {name: tensor.numel() for name, tensor in snapshot.weight_specs.items()}
            pieces = [[name, 0, sizes[name]] for name in expected]
            if len(pieces) != sum(len(group["params"]) for group in state["param_groups"]):
                raise SnapshotError(
                    f"The snapshot of step {snapshot.step} was written without pipeline stages, and its optimizer's state cannot "
                    f"be divided among {current().stages}: resume with init(stages=1), or begin anew."
                )
            parts = [{**state, "pieces": pieces}]
    load_optimizer(snapshot.replicated["optimizer"], parts, optimizer, options)
    if parts is None and not shards.sharded:
        _restore_types(snapshot, optimizer)
    # The loaded master weights are exact. With lossy communication, the model had rounded ones, and resumes with the same bits.
    shards.publish_weights(optimizer)
    if average is not None:
        _load_average(average, snapshot.replicated["ema"], parts if snapshot.sharding is not None else None)
    with errors_on_all("Snapshots: resume"):
        if scaler is not None and snapshot.replicated["scaler"] is not None:
            scaler.load_state_dict(snapshot.replicated["scaler"])
        set_extra_states(model, snapshot.replicated.get("extra", {}))
        same_ranks = snapshot.replicas == hvd.size() and bool(snapshot.per_stage)
        if current().number == 0 and (same_ranks or optimizer.replicas is not None):
            _warn_of_changes(snapshot, next(model.parameters()).device.type)
        # As many ranks as before: this rank has a random state and counts
        # of its own to resume with. Other numbers of ranks draw anew.
        if same_ranks:
            _load_rank_state(snapshot, model, optimizer)
        if optimizer.replicas is not None:
            optimizer.replicas.load_state_dict(snapshot.replicated["replicas"])
    return same_ranks


def load_optimizer(
    whole: Mapping[str, Any] | None,
    parts: Sequence[Mapping[str, Any]] | None,
    optimizer: Any,
    options: bool = False,
) -> None:
    """Loads the optimizer's state, ``whole`` or from ``parts``, with the options of its groups or without them. Collective."""
    before = [dict(group) for group in optimizer.param_groups]
    if parts is None:
        optimizer.load_state_dict(whole)
    else:
        load_parts(optimizer, parts)
    for group, kept in zip(optimizer.param_groups, () if options else before):
        group.clear()
        group.update(kept)


def _restore_types(snapshot: Snapshot, optimizer: Any) -> None:
    """Gives state of whole parameters the types that it was saved with: PyTorch has made those of the parameters of them.

    Of parameters that had another type themselves it stays, as the run resumes in another precision.
    """
    saved = snapshot.replicated["optimizer"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters):
        spec = snapshot.weight_specs.get(optimizer.parameter_names[parameter])
        if number in saved["state"] and spec is not None and spec.dtype == parameter.dtype:
            entries = optimizer.state.get(parameter, {})
            for name, value in saved["state"][number].items():
                if name != "step" and name in entries:  # PyTorch decides the type and place of this one
                    entries[name] = _with_types_of(value, entries[name])


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


def _load_rank_state(snapshot: Snapshot, model: nn.Module, optimizer: Any) -> None:
    """Loads this rank's own state. Without it a rank draws new random states, and learns again when gradients are final.

    Its random state is the same on all pipeline stages; its buffers are on the stages of their blocks. The reducer learns again if
    there were other stages.
    """
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for state in snapshot.per_stage:
            for name, value in state["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(value)
            set_extra_states(model, state.get("extra", {}))
    stage, grid = 0 if snapshot.sharding is None else snapshot.sharding.stage, current()
    if getattr(optimizer, "shard_stage", 0) == stage and (snapshot.pipeline_stages, snapshot.tensor) == (
        grid.stages,
        grid.tensor,
    ):
        optimizer.load_reduction_state_dict(snapshot.per_stage[grid.stage]["reduction"])
    set_random_state(snapshot.per_rank["random"])


def _warn_of_changes(snapshot: Snapshot, device: str) -> None:
    """Warns in one line of what may change the bits of the run's results: threads, kind of device, versions."""
    then = {"device": snapshot.replicated["device"], "CPU threads a rank": snapshot.replicated["threads"]}
    now: dict[str, Any] = {"device": device, "CPU threads a rank": torch.get_num_threads()}
    if snapshot.manifest is not None:
        then.update(snapshot.manifest.libraries)
        now.update({name: libraries()[name] for name in ("torch", "hvd_ckpt", "horovod")})
    changed = [
        f"{name} {then[name]} (now {now[name]})" for name in now if then.get(name, now[name]) != now[name]
    ]
    if changed:
        run_warnings.warn(
            f"The run had {', '.join(changed)}: the bits of its results may change; give the same for the same, such as "
            f"OMP_NUM_THREADS={snapshot.replicated['threads']}."
        )


def average_state(
    average: AveragedWeights | None, sharded: bool
) -> tuple[dict[str, Any] | None, dict[int, Tensor] | None]:
    """The average as replicated state, by parameter where nothing is sharded, and as this rank's shard, by its number."""
    if average is None:
        return None, None
    state = average.state_dict()
    names = [name for name, _, _ in state["pieces"]]
    whole = None if sharded else {names[number]: values for number, values in state["averages"].items()}
    return {"n_averaged": state["n_averaged"], "averages": whole}, state["averages"] if sharded else None


def _load_average(
    average: AveragedWeights, state: Mapping[str, Any] | None, parts: Sequence[Mapping[str, Any]] | None
) -> None:
    """Loads the average of a snapshot; without one it begins anew, with the next update. Collective."""
    if state is None:
        return
    if parts is None:
        whole = state["averages"]
        pieces = [(name, 0, values.numel()) for name, values in whole.items()]
        parts = [{"pieces": pieces, "averages": dict(enumerate(whole.values()))}]
    average.load_state_dict([{**part, "n_averaged": state["n_averaged"]} for part in parts])
