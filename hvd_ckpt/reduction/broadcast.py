"""Collectives for parameters, optimizer state and objects, where Horovod's own fail or hang.

These take any dtype (tensors travel as bytes; Horovod cannot send bfloat16 or bool) and compare names and shapes first. The
optimizer's state is sent as it is, without a step on zero gradients to make room for it, which would change AdamW's weights before
training has begun.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.agreement import (
    MESSAGE,
    ParameterFacts,
    agree_on_options,
    allgather_objects,
    broadcast_from,
    check_parameters,
    described,
    digest,
    meet_after_join,
)
from hvd_ckpt.collectives.asynchronous import Collectives, Work
from hvd_ckpt.processes.devices import check_devices
from hvd_ckpt.reduction.leveling import Live, common_state, level
from hvd_ckpt.reduction.wrapping import live_optimizers
from hvd_ckpt.utils.fingerprint import distinct
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import check_instance, stage_name
from hvd_ckpt.utils.torch_private import pytree
from hvd_ckpt.utils.unmaterialized import is_absent


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Broadcasts a Python object from one rank to all. Collective.

    Horovod's function names the message after the type of ``obj``, so it hangs if ranks pass different types, as in
    ``broadcast_object(state if rank() == 0 else None)``.

    Args:
        obj: an object that ``cloudpickle`` can pickle; only the root's object is used.
        root_rank: the rank that sends its object, as a number among all ranks.
        name: name of the message. Needed only if several threads broadcast objects at the same time.
        process_set: the ranks that take part.

    Returns:
        The object itself on the root, and a copy on the other ranks. GPU tensors arrive on the CPU.

    Raises:
        Exception: the object cannot be pickled; raised on every rank.
    """
    return broadcast_from(obj, root_rank, process_set, name or "hvd_ckpt.broadcast_object")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gathers one Python object from each rank, of any type, on all ranks. Collective.

    Args:
        obj: an object that ``cloudpickle`` can pickle.
        name: name of the message, equal on all ranks. Needed only if several threads gather objects at the same time.

    Returns:
        Copies of the objects, in the order of the ranks. GPU tensors arrive on the CPU.

    Raises:
        Exception: a rank's object cannot be pickled; raised on every rank.
    """
    return allgather_objects(obj, global_process_set, "allgather_object()", name or MESSAGE)


def join(device: int = -1) -> int:
    """Horovod's ``join``: this rank has no more data; it takes part in the others' allreduces with zeros until all have joined.

    Averages still divide by the number of all ranks. Afterwards every optimizer has the order and layout of the rank that joined
    last, which has run every step. Collective.

    Args:
        device: the device on which Horovod makes the zeros (-1: CPU, else a CUDA device index).

    Returns:
        The rank that joined last. Broadcast its weights.

    Raises:
        ValueError: an optimizer is sharded, has logical replicas, or is one of ``LocalSGD`` or of a process set. Or a rank that has
            not joined needs the others for more than an allreduce, such as for sparse gradients (pass ``sparse_as_dense=True``).
            Raised on every rank.
        RuntimeError: a rank has gradients that neither ``step()`` nor ``synchronize()`` has reduced; raised on every rank, once
            all have called it. All gradients are dropped.
    """
    error: Exception | None = None
    gc.collect()  # an optimizer that nobody has any more is no reason to refuse
    for optimizer in live_optimizers():
        members = optimizer.process_set
        check({
            "join()": True,
            "model": True,
            "an optimizer of LocalSGD": not optimizer.can_join,
            "shard": stage_name(optimizer.shard_stage),
            "replicas": True if optimizer.replicas else None,
            "process_set": members != global_process_set and members.included() and members.size() > 1,
        })  # fmt: skip
        # Some of this rank's gradients may be in the others' sums already, and the rest never would be.
        if optimizer.has_unreduced:
            error = error or RuntimeError(
                f"join() was called while {type(optimizer).__name__} has gradients of a backward pass that are not reduced; call "
                "its step() or synchronize() on every rank first"
            )
    try:
        last = meet_after_join(device, error)
    except Exception:
        # Horovod sends zeros in place of what a rank that joins has in flight, and never ends that: a later step() would wait for
        # it forever, and on the other ranks these sums lack this rank's gradients. So all ranks drop the step that they have begun.
        for optimizer in live_optimizers():
            if optimizer.reducer is not None:
                optimizer.reducer.abandon()
            optimizer.drop_gradients()
        raise
    live = Live()
    live.level(allgather_objects(live.states, global_process_set, "join()"), last)
    return last


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcasts tensors in place from one rank to all, matched by name. Collective.

    If ranks have loaded or reset a ``DistributedOptimizer`` separately, it reduces in the same order on all ranks again
    afterwards.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or lists of either.
        root_rank: the rank that sends its values.

    Raises:
        ValueError: ``params`` is of another type, or names, shapes, dtypes or ``root_rank`` differ between ranks. Or a tensor is
            not dense, or is on a GPU and Horovod has no operations on GPUs. Or a parameter is split over the ranks
            (``shard="parameters"``). Raised on every rank.
    """
    call = "broadcast_parameters()"
    error: Exception | None = None
    tensors: list[tuple[str, torch.Tensor]] = []
    try:
        _check_root(root_rank)
        tensors = _named_tensors(params)
    except ValueError as exception:
        error = exception
    # Layouts, devices and what is trained may differ between ranks.
    facts = [
        replace(ParameterFacts.of(*pair), stride=(), device_type="", requires_grad=False) for pair in tensors
    ]
    live = Live()
    own, brought = described(root_rank=root_rank), (digest(facts), live.states)
    digests, states = zip(*agree_on_options(call, own, error, brought, global_process_set))
    if len(set(digests)) > 1:
        check_parameters(allgather_objects(facts, global_process_set, f"{call}: tensors"))
        raise ValueError(f"{call}: a name is given more often on some ranks than on others")
    broadcast_tensors([tensor for _, tensor in tensors], root_rank, "hvd_ckpt.parameters")
    live.level(states, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives every rank the optimizer state and options of one rank. Collective.

    Weights, gradients and step counts do not change, and a new optimizer remains without state. Any state that consists of
    tensors, numbers, lists, tuples and dicts is sent, including that of LBFGS. For a sharded optimizer only the options are sent,
    since each rank's state is its own part. Parameters of a ``DistributedOptimizer`` are matched by name, others by position. If
    ranks have loaded or reset an optimizer separately, the order of reduction also becomes that of the root, and gradients are
    dropped.

    Args:
        optimizer: a bare optimizer or a ``DistributedOptimizer``.
        root_rank: the rank that sends its state.
        model: accepted for compatibility with Horovod, which needs it to find sparse parameters.

    Raises:
        ValueError: parameter groups, stage of sharding, logical replicas or ``root_rank`` differ between ranks. Or a parameter is
            on a GPU, and Horovod has no operations on GPUs. Raised on every rank.
    """
    check_instance(
        optimizer,
        torch.optim.Optimizer,
        "broadcast_optimizer_state: optimizer must be a torch.optim.Optimizer",
    )
    call = "broadcast_optimizer_state()"
    stage, replicas = getattr(optimizer, "shard_stage", 0), getattr(optimizer, "replicas", None)
    names = [] if stage else [_names_in(optimizer, group) for group in optimizer.param_groups]
    options = described(
        root_rank=root_rank,
        optimizer=getattr(optimizer, "wrapped_class", type(optimizer)),
        shard=stage,
        replicas=None
        if replicas is None
        else f"{replicas.number} of seed {replicas.seed} at step {replicas.step}",
        param_groups=len(optimizer.param_groups),
    )
    # The first difference is what the error shows. Where numbers differ, they say more than two long lists.
    options |= {f"the number of parameters in group {number}": len(own) for number, own in enumerate(names)}
    options |= {f"the set of parameters in group {number}": sorted(own) for number, own in enumerate(names)}
    error: Exception | None = None
    try:
        _check_root(root_rank)
        for number, group in enumerate(optimizer.param_groups):
            check_devices((f"a parameter of group {number}", parameter) for parameter in group["params"])
    except ValueError as exception:
        error = exception
    states = agree_on_options(call, options, error, common_state(optimizer), global_process_set)
    tensors: list[torch.Tensor] = []
    entries = _entries(optimizer, bool(stage))
    outline = None
    if mpi_ops.rank() == root_rank:
        outline = {key: _outline(value, tensors, parameter) for key, (value, parameter) in entries.items()}
    outline = broadcast_from(outline, root_rank, global_process_set, "hvd_ckpt.optimizer")
    # In the order of the root's entries: tensors are matched by their place in the list alone.
    for (number, name), outlined in outline.items() if mpi_ops.rank() != root_rank else ():
        _, parameter = entries.get((number, name), (None, None))
        value = _rebuild(outlined, tensors, parameter)
        if number == _OTHERS:
            optimizer.state[name] = value
        elif name is None:
            optimizer.param_groups[number].update(value)
        elif value:
            optimizer.state[parameter] = value
        else:
            optimizer.state.pop(parameter, None)
    for _, key in entries.keys() - outline.keys():  # none of which are of parameters
        del optimizer.state[key]
    broadcast_tensors(tensors, root_rank, "hvd_ckpt.optimizer.state")
    level(optimizer, dict(enumerate(states)), root_rank)


def _check_root(root_rank: int) -> None:
    if root_rank not in range(mpi_ops.size()):
        raise ValueError(f"root_rank must be a rank from 0 to {mpi_ops.size() - 1}, not {root_rank!r}")


def _names_in(optimizer: Any, group: Mapping[str, Any]) -> list[str]:
    """The names of a group's parameters; their places where they have none."""
    named = getattr(optimizer, "parameter_names", {})
    given = group.get("param_names") or map(str, range(len(group["params"])))
    return [named.get(parameter, name) for parameter, name in zip(group["params"], given)]


@dataclass(frozen=True)
class _TensorOutline:
    """Stands for a tensor of the state while its structure is sent: tensors follow, in this order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    beside_parameter: bool


_OTHERS = -1  # in place of a group's number


def _entries(optimizer: torch.optim.Optimizer, sharded: bool) -> dict[tuple[int, Any], tuple[Any, Any]]:
    """What is sent, with the parameter that it is of: each group's options, by the group's number; and, unless it is sharded, the
    state of each of its parameters, by number and name, and what is kept under other keys."""
    state: dict[Any, Any] = {} if sharded else optimizer.state
    others = {key: kept for key, kept in state.items() if not isinstance(key, torch.Tensor)}
    entries: dict[tuple[int, Any], tuple[Any, Any]] = {
        (_OTHERS, key): (kept, None) for key, kept in others.items()
    }
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        entries[number, None] = options, next(iter(group["params"]), None)
        for name, parameter in () if sharded else zip(_names_in(optimizer, group), group["params"]):
            entries[number, name] = dict(optimizer.state.get(parameter, {})), parameter
    return entries


def _outline(value: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    def outline_of(tensor: torch.Tensor) -> _TensorOutline:
        tensors.append(tensor)
        beside = parameter is not None and tensor.device == parameter.device
        return _TensorOutline(tuple(tensor.shape), tensor.dtype, beside)

    return pytree.tree_map_only(torch.Tensor, outline_of, value)


def _rebuild(outline: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    def tensor_of(leaf: _TensorOutline) -> torch.Tensor:
        device = parameter.device if parameter is not None and leaf.beside_parameter else "cpu"
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))
        return tensors[-1]

    return pytree.tree_map_only(_TensorOutline, tensor_of, outline)


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], root_rank: int, name: str, process_set: Any = global_process_set
) -> None:
    """Broadcasts the values of a rank of the job in place. All ranks of the set call it with tensors of the same names, shapes and
    dtypes.
    """
    collectives = Collectives(process_set, name)
    # All broadcasts begin before the first one is waited for. Until then Horovod writes to ``contiguous``,
    # which must be held here where it is a copy.
    pending: list[tuple[torch.Tensor, torch.Tensor, Work]] = []
    with torch.no_grad():
        for number, given in enumerate(tensors):
            if given.numel():
                tensor = distinct(given.detach())
                contiguous = tensor.contiguous()
                content = contiguous.view(-1).view(torch.uint8)
                pending.append((tensor, contiguous, collectives.broadcast(content, root_rank, str(number))))
        for tensor, contiguous, work in pending:
            work.wait()
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        raise ValueError(
            f"broadcast_parameters: params is a {type(params).__name__}: give model.state_dict() or model.named_parameters()"
        )
    if isinstance(params, Mapping):
        items = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        items = [
            pair if isinstance(pair, tuple) else (f"{number:09}", pair) for number, pair in enumerate(params)
        ]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: '{name}' is a {type(tensor).__name__}, not a tensor; "
                f"use broadcast_object for it"
            )
        if is_absent(tensor):
            split = f"broadcast_parameters of '{name}', which is split"
            given = {"shard": "parameters", "model": True, "broadcast_parameters": True}
            check(given, {"broadcast_parameters": split})
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else tensor.layout
            kind = "on the meta device" if tensor.is_meta else kind
            raise ValueError(
                f"broadcast_parameters: '{name}' is {kind}, and only dense tensors can be broadcast in place; leave it out, "
                f"and use broadcast_object for it"
            )
    check_devices(items)
    return sorted(items, key=lambda pair: pair[0])
