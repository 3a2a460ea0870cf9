"""Tied parameters: parameters that blocks on several stages share, such as token embeddings that are also the weights of the head.

Each of these stages has a copy. After the backward passes of a step, each stage adds the gradients of all copies in the order of
the stages, so that the copies stay equal bit for bit. The sum equals that of an unstaged model up to rounding: there, the
gradients of all uses are added micro-batch by micro-batch.

Nothing adds up buffers, such as the statistics of a batch norm. A module at places in several chunks must not write its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.parallel.pipeline.transport import Transport
from hvd_ckpt.reduction.machine import owner_of
from hvd_ckpt.utils.fingerprint import fingerprint

# The gradient of a copy on its way, with three replicas (columns) of two stages (rows). Up to two replicas, only the middle step:
#
#     each process has the sum over its own micro-batches             g00  g01  g02
#                                                                     g10  g11  g12
#
#     reduce-scatter in each row: replica r has part r of the sum     s00  s01  s02      s0r = part r of g00 + g01 + g02, in order
#     over the replicas of its stage                                  s10  s11  s12
#
#     exchange in each column: part r of the sum over the stages      t0   t1   t2       tr = s0r + s1r, on both stages
#                                                                     t0   t1   t2
#
#     the optimizer's reduction in each row adds (t0, 0, 0), (0, t1, 0) and (0, 0, t2)
#
# Horovod's order of additions with more than two replicas depends on the place in a bucket, which differs between stages. In the
# last step, it only adds zeros, so all copies get the same bits.


class Tied(NamedTuple):
    """A parameter with a copy on each of several stages, in ascending order."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]


def find_tied(blocks: Sequence[nn.Module], names: Sequence[str], stage_of: Sequence[int]) -> list[Tied]:
    """The parameters that several stages share, in the order of the whole model.

    Args:
        blocks, names: blocks of the whole model and their names.
        stage_of: the stage of each block.
    """
    stages_of: dict[nn.Parameter, tuple[str, set[int]]] = {}
    for name, block, stage in zip(names, blocks, stage_of):
        for inner, parameter in block.named_parameters():
            _, on = stages_of.setdefault(parameter, (f"{name}.{inner}", set()))
            on.add(stage)
    return [
        Tied(name, parameter, tuple(sorted(on)))
        for parameter, (name, on) in stages_of.items()
        if len(on) > 1  # including frozen ones, which may be trained later
    ]


class Apart(NamedTuple):
    """A module with buffers at places in several chunks."""

    name: str
    module: nn.Module
    chunks: list[int]


def find_apart(
    blocks: Sequence[nn.Module], names: Sequence[str], chunk_of: Sequence[int], own: Container[int]
) -> list[Apart]:
    """The modules with buffers at places in several chunks, one of which is of this rank's ``own``."""
    found: dict[nn.Module, Apart] = {}
    for name, block, chunk in zip(names, blocks, chunk_of):
        for inner, module in block.named_modules():
            if module._buffers:
                found.setdefault(module, Apart(f"{name}.{inner}".strip("."), module, [])).chunks.append(chunk)
    return [one for one in found.values() if len(set(one.chunks)) > 1 and any(c in own for c in one.chunks)]


@contextlib.contextmanager
def unchanged(modules: Sequence[Apart]) -> Iterator[None]:
    """A context in which these modules must not write their buffers.

    Raises:
        ValueError: one has. Each stage has buffers of its own, and chunks write them in another order than the whole model.
    """
    before = [_prints_of(one.module) for one in modules]
    yield
    for one, prints in zip(modules, before):
        if _prints_of(one.module) != prints:
            chunks = ", ".join(map(str, sorted(set(one.chunks))))
            raise ValueError(
                f"Pipeline: '{one.name}' updates its buffers in chunks {chunks} of the model, where they "
                f"would differ from those of the whole model: give each place a module of its own, or choose a balance that has "
                f"all its places in one chunk"
            )


def _prints_of(module: nn.Module) -> list[int]:
    return [int(fingerprint(buffer)) for buffer in module._buffers.values() if buffer is not None]


@contextlib.contextmanager
def summed_over_stages(tied: Sequence[Tied], transport: Transport, tag: int) -> Iterator[None]:
    """A context around the backward passes of a step, after which each copy of a parameter has the sum of all gradients of it.

    The reducer counts the sum as one more accumulation. Collective over the stages of a replica, and over all ranks with more than
    two replicas.

    Args:
        tied: the parameters that this rank shares with other stages, in the same order on all stages.
        transport: connects the stages.
        tag: tag of the messages.

    Raises:
        ValueError: the gradient of a parameter is sharded, so no rank has it.
    """
    # Earlier gradients are put aside, so that this step's are alone when the copies are added.
    before = [_put_aside(tie) for tie in tied]
    yield
    if not tied:
        return
    grid = transport.grid
    exchanges = [_fixed_order(tie.parameter) for tie in tied]
    parts = [
        _copy(tie.parameter.grad) if exchange is None else _part(tie, exchange)
        for tie, exchange in zip(tied, exchanges)
    ]
    # All sends are started before the first receive is waited for: the
    # stages run the same lines, and none may wait for another to send.
    for tie, part in zip(tied, parts):
        for stage in tie.stages:
            if stage != grid.stage:
                transport.send([part], grid.process(stage), tag)
    for tie, exchange, part, earlier in zip(tied, exchanges, parts, before):
        parameter, total = tie.parameter, None
        for stage in tie.stages:
            there = part
            if stage != grid.stage:
                there = transport.receive(grid.process(stage), tag, f"the gradient of '{tie.name}'").value[0]
            if there is not None:
                total = there if total is None else total + there
        if total is not None and exchange is not None:
            # This replica's part in its place, and zeros.
            rows = parameter.new_zeros(exchange.ranks, len(total), requires_grad=False)
            rows[exchange.rank] = total
            total = rows.view(-1)[: parameter.numel()].view(parameter.shape)
        if parameter.grad is not None:
            # In place: the gradient may be a view into a bucket of the reducer.
            parameter.grad.copy_(torch.zeros_like(parameter) if earlier is None else earlier)
        if total is not None and parameter.requires_grad:
            # Through autograd, so that the reducer's hook sees the sum as one more accumulation.
            torch.autograd.backward([parameter], [total])
    transport.flush()


def _put_aside(tie: Tied) -> Tensor | None:
    """The gradient so far, which becomes zero."""
    owner = owner_of(tie.parameter)
    if owner is not None and owner.shard_stage > 1:
        raise ValueError(
            f"parameter '{tie.name}' is shared by stages {', '.join(map(str, tie.stages))}, so its gradient cannot be sharded: use "
            f'shard="none" or "optimizer"'
        )
    gradient = tie.parameter.grad
    before = _copy(gradient)
    # Zeroed and not dropped: the reducer may have it as a view into a bucket.
    if gradient is not None:
        gradient.zero_()
    return before


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _fixed_order(parameter: Tensor) -> Exchange | None:
    """An exchange that adds a gradient over the replicas in their order; None if the order does not matter."""
    owner = owner_of(parameter)
    if not parameter.requires_grad or owner is None or owner.reduces_updates:
        return None
    # The sum of two numbers does not depend on their order.
    return Exchange(owner.process_set, "hvd_ckpt.tied") if owner.process_set.size() > 2 else None


def _part(tie: Tied, exchange: Exchange) -> Tensor:
    """This replica's part of the sum of the gradient over all replicas."""
    parameter = tie.parameter
    padded = exchange.ranks * -(-parameter.numel() // exchange.ranks)
    flat = torch.zeros(padded, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        flat[: parameter.numel()] = parameter.grad.reshape(-1)
    return exchange.reduce_scatter(flat, tie.name).wait(f"the gradient of '{tie.name}' on all replicas")
