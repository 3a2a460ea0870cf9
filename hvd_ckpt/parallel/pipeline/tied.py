"""Tied parameters: parameters that blocks on several stages share, such as token embeddings that are also the weights of the head.

Each of these stages has a copy. After the backward passes of a step, each stage adds the gradients of all copies in the order of
the stages, so that the copies stay equal bit for bit. The sum equals that of an unstaged model up to rounding: there, the
gradients of all uses are added micro-batch by micro-batch.

Nothing adds up buffers, such as the statistics of a batch norm. A module at places in several chunks must not write its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.parallel.pipeline.transport import TIED_TAG, Transport
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


class Shared(NamedTuple):
    """A parameter or module, its name, and the stages or chunks that it is in, in ascending order."""

    name: str
    what: Any
    places: tuple[int, ...]


def find_shared(
    blocks: Sequence[nn.Module],
    names: Sequence[str],
    places: Sequence[int],
    parts_of: Callable[[nn.Module], Iterable[tuple[str, Any]]],
) -> list[Shared]:
    """The parts that blocks at several places have in common, in the order of the whole model.

    Args:
        blocks, names, places: blocks of the whole model, their names, and the stage or chunk of each.
        parts_of: gives parts of a block with their names in it.
    """
    found: dict[Any, tuple[str, set[int]]] = {}
    for name, block, place in zip(names, blocks, places):
        for inner, part in parts_of(block):
            found.setdefault(part, (f"{name}.{inner}".strip("."), set()))[1].add(place)
    # Including frozen parameters, which may be trained later.
    return [Shared(name, part, tuple(sorted(at))) for part, (name, at) in found.items() if len(at) > 1]


def with_buffers(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block that have buffers of their own."""
    return ((name, module) for name, module in block.named_modules() if module._buffers)


@contextlib.contextmanager
def unchanged(modules: Sequence[Shared]) -> Iterator[None]:
    """A context in which these modules, which are in several chunks, must not write their buffers.

    Raises:
        ValueError: one has. Each stage has buffers of its own, and chunks write them in another order than the whole model.
    """
    before = [_prints_of(one.what) for one in modules]
    yield
    for one, prints in zip(modules, before):
        if _prints_of(one.what) != prints:
            chunks = ", ".join(map(str, one.places))
            raise ValueError(
                f"Pipeline: '{one.name}' updates its buffers in chunks {chunks} of the model, where they "
                f"would differ from those of the whole model: give each place a module of its own, or choose a balance that has "
                f"all its places in one chunk"
            )


def _prints_of(module: nn.Module) -> list[int]:
    return [int(fingerprint(buffer)) for buffer in module._buffers.values() if buffer is not None]


@contextlib.contextmanager
def summed_over_stages(tied: Sequence[Shared], transport: Transport) -> Iterator[None]:
    """A context around the backward passes of a step, after which each copy of a parameter has the sum of all gradients of it.

    The reducer counts the sum as one more accumulation. Collective over the stages of a replica, and over all ranks with more than
    two replicas.

    Args:
        tied: the parameters that this rank shares with other stages, in the same order on all stages.
        transport: connects the stages.

    Raises:
        ValueError: the gradient of a parameter is sharded, so no rank has it.
    """
    # Earlier gradients are put aside, so that this step's are alone when the copies are added.
    before = [_put_aside(tie) for tie in tied]
    yield
    if not tied:
        return
    grid = transport.grid
    exchanges = [_fixed_order(tie.what) for tie in tied]
    parts = [
        _copy(tie.what.grad) if exchange is None else _part(tie, exchange)
        for tie, exchange in zip(tied, exchanges)
    ]
    # All sends are started before the first receive is waited for: the
    # stages run the same lines, and none may wait for another to send.
    for tie, part in zip(tied, parts):
        for stage in tie.places:
            if stage != grid.stage:
                transport.send([part], grid.process(stage), TIED_TAG)
    for tie, exchange, part, earlier in zip(tied, exchanges, parts, before):
        parameter, total = tie.what, None
        for stage in tie.places:
            there = part
            if stage != grid.stage:
                what = f"the gradient of '{tie.name}'"
                there = transport.receive(grid.process(stage), TIED_TAG, what).value[0]
            if there is not None:
                total = there if total is None else total + there
        if total is not None and exchange is not None:
            # This replica's part in its place, and zeros.
            parts_before, parts_behind = exchange.rank, exchange.ranks - 1 - exchange.rank
            total = functional.pad(total, (parts_before * len(total), parts_behind * len(total)))
            total = total[: parameter.numel()].view(parameter.shape).to(parameter.dtype)
        if parameter.grad is not None:
            # In place: the gradient may be a view into a bucket of the reducer.
            parameter.grad.copy_(torch.zeros_like(parameter) if earlier is None else earlier)
        if total is not None and parameter.requires_grad:
            # Through autograd, so that the reducer's hook sees the sum as one more accumulation.
            torch.autograd.backward([parameter], [total])
    transport.flush()


def _put_aside(tie: Shared) -> Tensor | None:
    """The gradient so far, which becomes zero."""
    owner = owner_of(tie.what)
    if owner is not None and owner.shard_stage > 1:
        raise ValueError(
            f"parameter '{tie.name}' is shared by stages {', '.join(map(str, tie.places))}, so its gradient cannot be sharded: use "
            f'shard="none" or "optimizer"'
        )
    gradient = tie.what.grad
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


def _part(tie: Shared, exchange: Exchange) -> Tensor:
    """This replica's part of the sum of the gradient over all replicas."""
    gradient = torch.zeros_like(tie.what) if tie.what.grad is None else tie.what.grad
    flat = functional.pad(gradient.detach().reshape(-1), (0, -gradient.numel() % exchange.ranks))
    return exchange.reduce_scatter(flat, tie.name).wait(f"the gradient of '{tie.name}' on all replicas")
