"""Collectives for parameters, optimizer state, objects and reduce-scatter, where Horovod's own fail or hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, ProcessSet, Sum, global_process_set

from hvd_ckpt.fingerprint import distinct
from hvd_ckpt.reduction.agreement import allgather_objects, broadcast_from, raise_together
from hvd_ckpt.reduction.wrapping import live_optimizers
from hvd_ckpt.torch_private import pytree
from hvd_ckpt.unmaterialized import is_absent

# Starting equal: rank 0's parameters and optimizer state on every rank.
#
# Unlike Horovod's, these take any dtype (tensors travel as bytes; Horovod cannot send bfloat16 or bool) and compare names and
# shapes first; and the optimizer's state is sent as it is, without a step on zero gradients to make room for it, which would
# change AdamW's weights before training has begun.


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Broadcasts a Python object from one rank to all. Collective.

    Horovod's own names the message by the type of ``obj``, and so waits forever where ranks give different types, as in
    ``broadcast_object(state if rank() == 0 else None)``.

    Args:
        obj: what ``cloudpickle`` can store; only the root's counts.
        root_rank: the rank whose object everyone gets, among all ranks.
        name: of the message; to be given where several threads broadcast objects at the same time.
        process_set: the ranks that take part.

    Returns:
        The object itself on the root, a copy on the other ranks.

    Raises:
        Exception: the object cannot be stored; on every rank.
    """
    return broadcast_from(obj, root_rank, process_set, name or "hvd_ckpt.broadcast_object")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gathers one Python object of each rank, of any type, on all ranks. Collective.

    Args:
        obj: what ``cloudpickle`` can store.
        name: of the message; to be given where several threads gather objects at the same time.

    Returns:
        Copies of the objects, by rank.

    Raises:
        Exception: a rank's object cannot be stored; on every rank.
    """
    return allgather_objects(obj, global_process_set, name or "hvd_ckpt.allgather_object")


def join(device: int = -1) -> int:
    """Horovod's ``join``: this rank has no more data; it takes part in the others' allreduces with zeros until all have joined.

    Averages still divide by the number of all ranks. Afterwards every optimizer takes over the order and layout of the rank
    that joined last, which has seen every step. Collective.

    Args:
        device: where Horovod makes its zeros (-1: CPU, else a CUDA device index).

    Returns:
        The rank that joined last: its weights are the ones to broadcast.

    Raises:
        ValueError: an optimizer is sharded, or one of ``LocalSGD``; on every rank.
    """
    optimizers = live_optimizers()
    for optimizer in optimizers:
        if not optimizer.can_join:
            raise ValueError(
                "join() cannot be used while there is an optimizer of LocalSGD: a rank without data goes on to call its step(), "
                "without gradients"
            )
        if optimizer.shard_stage:
            raise ValueError(
                "join() cannot be used while an optimizer is sharded: each rank holds a part that the others need in every step; "
                "give every rank as many batches"
            )
    last: int = mpi_ops.join(device)
    reducers = {}
    for optimizer in optimizers:
        if optimizer._process_set == global_process_set and optimizer._reducer:
            reducers[optimizer._identity] = optimizer._reducer
    # A rank may have collected an optimizer that others still have.
    known = [
        set(identities)
        for identities in allgather_objects(list(reducers), global_process_set, "hvd_ckpt.join")
    ]
    for identity in sorted(set.intersection(*known)):
        reducer = reducers[identity]
        own = (reducer.state_dict(), reducer.naming)
        state, (_, generation) = broadcast_from(own, last, global_process_set, f"hvd_ckpt.join.{identity}")
        if mpi_ops.rank() != last:
            reducer.follow(state)
        reducer.rename(identity, generation + 1)
    return last


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcasts tensors in place from one rank to all. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or lists of either.
        root_rank: the rank whose values everyone gets.

    Raises:
        ValueError: ``params`` is of another type, or names, shapes or dtypes differ between ranks, or a parameter is split over the
            ranks (``shard="parameters"``); on every rank.
    """
    error: Exception | None = None
    tensors: list[tuple[str, torch.Tensor]] = []
    try:
        tensors = _named_tensors(params)
    except ValueError as exception:
        error = exception
    expected = broadcast_from(
        [_facts(*pair) for pair in tensors], root_rank, global_process_set, "hvd_ckpt.parameters"
    )
    if error is None:
        error = _difference([_facts(*pair) for pair in tensors], expected, root_rank)
    raise_together(error, global_process_set, "hvd_ckpt.parameters.check")
    broadcast_tensors([tensor for _, tensor in tensors], root_rank, "hvd_ckpt.parameters")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives every rank the optimizer state and options of one rank. Collective.

    Weights, gradients and step counts are left untouched; a fresh optimizer stays fresh. Any state that is made of
    tensors, numbers, lists, tuples and dicts is sent, LBFGS's too. Of a sharded optimizer only the options are: each rank's
    state is its own part of the whole.

    Args:
        optimizer: a bare optimizer or a ``DistributedOptimizer``.
        root_rank: the rank whose state everyone gets.
        model: accepted for compatibility with Horovod, which needs it to find sparse parameters.

    Raises:
        ValueError: the numbers of parameter groups or parameters differ between ranks; on every rank.
    """
    tensors: list[torch.Tensor] = []
    outline = None
    if getattr(optimizer, "shard_stage", 0):
        _broadcast_options(optimizer, root_rank)
        return
    if mpi_ops.rank() == root_rank:
        outline = [_outline_group(optimizer, group, tensors) for group in optimizer.param_groups]
    outline = broadcast_from(outline, root_rank, global_process_set, "hvd_ckpt.optimizer")
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(states) for _, states in outline]
    error = (
        None
        if ours == theirs
        else ValueError(
            f"the optimizer has parameter groups of {ours} parameters here and of {theirs} on rank {root_rank}; "
            f"build the same optimizer on every rank"
        )
    )
    raise_together(error, global_process_set, "hvd_ckpt.optimizer.check")
    if mpi_ops.rank() != root_rank:
        for group, (options, states) in zip(optimizer.param_groups, outline):
            group.update(_rebuild(options, tensors, group["params"][0] if group["params"] else None))
            for parameter, state in zip(group["params"], states):
                if state:
                    optimizer.state[parameter] = _rebuild(state, tensors, parameter)
                else:
                    optimizer.state.pop(parameter, None)
    broadcast_tensors(tensors, root_rank, "hvd_ckpt.optimizer.state")


def _broadcast_options(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    theirs = broadcast_from(options, root_rank, global_process_set, "hvd_ckpt.optimizer.options")
    for group, values in zip(optimizer.param_groups, theirs):
        group.update(values)


@dataclass(frozen=True)
class _TensorOutline:
    """Stands for a tensor of the state while its structure is sent: tensors follow, in this order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    beside_parameter: bool


def _outline_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensors: list[torch.Tensor]
) -> tuple[Any, list[Any]]:
    first = group["params"][0] if group["params"] else None
    options = _outline({key: value for key, value in group.items() if key != "params"}, tensors, first)
    states = [
        _outline(dict(optimizer.state.get(parameter, {})), tensors, parameter)
        for parameter in group["params"]
    ]
    return options, states


def _outline(value: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        beside = parameter is not None and leaf.device == parameter.device
        return _TensorOutline(tuple(leaf.shape), leaf.dtype, beside)

    return pytree.tree_map(one, value)


def _rebuild(outline: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, _TensorOutline):
            return leaf
        device = parameter.device if parameter is not None and leaf.beside_parameter else "cpu"
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))
        return tensors[-1]

    return pytree.tree_map(one, outline)


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], root_rank: int, name: str, process_set: Any = global_process_set
) -> None:
    """One rank's values of tensors that are known to be alike on the ranks of the set, which all call this; in place.

    Args:
        root_rank: among all ranks.
    """
    pending = []
    with torch.no_grad():
        for number, given in enumerate(tensors):
            if given.numel():
                tensor = distinct(given.detach())
                contiguous = tensor.contiguous()
                wire = contiguous.view(-1).view(torch.uint8)
                handle = mpi_ops.broadcast_async_(wire, root_rank, f"{name}.{number}", process_set)
                pending.append((tensor, contiguous, handle))
        for tensor, contiguous, handle in pending:
            mpi_ops.synchronize(handle)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        items = [
            pair if isinstance(pair, tuple) else (f"{number}", pair) for number, pair in enumerate(params)
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
            raise ValueError(
                f"broadcast_parameters: parameter '{name}' is split over the ranks, which all began with rank 0's values already; "
                f"leave this call out, or make it inside optimizer.gathered_parameters()"
            )
    return items


def _facts(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], torch.dtype]:
    return name, tuple(tensor.shape), tensor.dtype


def _difference(ours: list[Any], theirs: list[Any], root_rank: int) -> ValueError | None:
    for here, there in zip(ours, theirs):
        if here != there:
            return ValueError(
                f"broadcast_parameters: '{here[0]}' of shape {here[1]} and {here[2]} here is '{there[0]}' of shape "
                f"{there[1]} and {there[2]} on rank {root_rank}; build the same model on every rank"
            )
    if len(ours) != len(theirs):
        return ValueError(
            f"broadcast_parameters: {len(ours)} tensors here, {len(theirs)} on rank {root_rank}; "
            f"build the same model on every rank"
        )
    return None


# ``horovod.torch.reducescatter`` and its three relatives, with a ``prescale_factor`` that needs no fusion buffer.
#
# Horovod scales the input in its fusion buffer, and refuses an input that is larger; with fusion off, that is each one. Here the
# input is scaled before it is handed to Horovod, by the same arithmetic. Arguments, results and gradients are Horovod's.


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`reducescatter`, without gradients or compression; returns a handle for ``poll`` and ``synchronize``."""
    with torch.no_grad():
        scaled = _scaled(tensor, prescale_factor)
    handle: int = mpi_ops.reducescatter_async(
        scaled, name, op, process_set, postscale_factor=postscale_factor
    )
    return handle


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the reduction of ``tensor`` over the ranks, as ``horovod.torch.reducescatter``.

    Args:
        tensor: of one or more dimensions, of the same shape on every rank; it is not modified.
        name: of the operation; Horovod numbers unnamed ones.
        compression: the format in which the input travels.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies the input, before the reduction. Integers are rounded towards zero.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows: the first dimension is divided over the ranks, earlier ranks have one more where it does not divide.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`grouped_reducescatter`, without gradients or compression; returns a handle."""
    with torch.no_grad():
        scaled = [_scaled(tensor, prescale_factor) for tensor in tensors]
    handle: int = mpi_ops.grouped_reducescatter_async(
        scaled, name, op, process_set, postscale_factor=postscale_factor
    )
    return handle


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, which start together."""
    wires = [compression.compress(tensor) for tensor in tensors]
    scaled = [_scaled(wire, prescale_factor) for wire, _ in wires]
    results = _ReduceScatter.apply(name, op, process_set, postscale_factor, *scaled)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, context) for result, (_, context) in zip(results, wires)]


class _ReduceScatter(torch.autograd.Function):
    """Horovod's, with gradients gathered under a name of the forward pass: an unnamed gather may differ between ranks, and hang."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, process_set: ProcessSet, factor: float, *tensors: torch.Tensor
    ) -> Any:
        handle = mpi_ops.grouped_reducescatter_async(
            list(tensors), name, op, process_set, postscale_factor=factor
        )
        ctx.name = f"{name or f'reducescatter.{handle}'}.gradient"
        ctx.process_set, ctx.factor = process_set, factor * (process_set.size() if op == Sum else 1)
        return tuple(mpi_ops.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        handle = mpi_ops.grouped_allgather_async(scaled, ctx.name, ctx.process_set)
        return None, None, None, None, *mpi_ops.synchronize(handle)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)
