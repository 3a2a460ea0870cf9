"""Parameters that blocks on several stages share, such as token embeddings that are also the weights of the head.

Each of these stages has a copy. After the backward passes of a step the copies' gradients are added in the order of the stages, on
each of them alike, so that the copies stay equal bit for bit. The sum equals that of an unstaged model to rounding: there,
gradients of both uses are added up micro-batch by micro-batch.

The order in which Horovod adds the gradients of more than two replicas depends on the place in a bucket, which differs between
stages. So there each replica adds up an equal part of the gradient over all replicas, in their order, and then over the stages;
the replicas bring these sums to the optimizer's reduction, which adds nothing but zeros to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.pipeline.transport import Transport
from hvd_ckpt.reduction.accumulation import owner_of
from hvd_ckpt.sharding.exchange import Exchange


class Tied(NamedTuple):
    """A parameter with a copy on each of several stages, in ascending order."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]


def find_tied(blocks: Sequence[nn.Module], names: Sequence[str], stage_of: Sequence[int]) -> list[Tied]:
    """The parameters that several stages share, in the order of the whole model.

    Args:
        blocks, names: of the whole model.
        stage_of: the stage of each block.
    """
    found: dict[nn.Parameter, tuple[str, set[int]]] = {}
    for name, block, stage in zip(names, blocks, stage_of):
        for inner, parameter in block.named_parameters():
            _, on = found.setdefault(parameter, (f"{name}.{inner}", set()))
            on.add(stage)
    return [
        Tied(name, parameter, tuple(sorted(on)))
        for parameter, (name, on) in found.items()
        if len(on) > 1  # frozen ones too: they may be trained later
    ]


class TiedGradients:
    """The gradients of this step of the parameters that this rank shares with other stages.

    Args:
        tied: the parameters, in an order that is the same on all stages.
        transport: to the other stages.
        tag: of the messages.

    Raises:
        ValueError: a parameter's gradient is sharded, so that it is not there to be added.
    """

    def __init__(self, tied: Sequence[Tied], transport: Transport, tag: int) -> None:
        self._tied, self._transport, self._tag = tied, transport, tag
        self._before: list[Tensor | None] = []
        for one in tied:
            owner = owner_of(one.parameter)
            if owner is not None and owner.shard_stage > 1:
                raise ValueError(
                    f"parameter '{one.name}' is shared by stages {', '.join(map(str, one.stages))}, so its gradient cannot be "
                    f'sharded: use shard="none" or "optimizer"'
                )
            gradient = one.parameter.grad
            self._before.append(_copy(gradient))
            if gradient is not None:
                gradient.zero_()

    def add(self) -> None:
        """Gives each copy the sum over all stages, by one more accumulation, which the reducer counts like those before.

        Collective over the stages of a replica, and over all ranks with more than two replicas.
        """
        grid = self._transport.grid
        exchanges = [_fixed_order(one.parameter) for one in self._tied]
        own = [
            _part(one, exchange) if exchange is not None else _copy(one.parameter.grad)
            for one, exchange in zip(self._tied, exchanges)
        ]
        for one, part in zip(self._tied, own):
            for stage in one.stages:
                if stage != grid.stage:
                    self._transport.send([part], grid.process(stage), self._tag)
        for one, exchange, part, before in zip(self._tied, exchanges, own, self._before):
            total: Tensor | None = None
            for stage in one.stages:
                if stage != grid.stage:
                    what = f"the gradient of '{one.name}'"
                    part_there = self._transport.receive(grid.process(stage), self._tag, what).value[0]
                else:
                    part_there = part
                if part_there is not None:
                    total = part_there if total is None else total + part_there
            if total is not None and exchange is not None:
                total = _in_place(total, one.parameter, exchange)
            if one.parameter.grad is not None:
                one.parameter.grad.copy_(torch.zeros_like(one.parameter) if before is None else before)
            if total is not None and one.parameter.requires_grad:
                torch.autograd.backward([one.parameter], [total])
        self._transport.flush()


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _fixed_order(parameter: Tensor) -> Exchange | None:
    """What adds a gradient over the replicas in their order; None where any order gives the same bits, or sums are no concern."""
    owner = owner_of(parameter)
    if not parameter.requires_grad or owner is None or owner.reduces_updates:
        return None
    if owner.process_set.size() <= 2:
        return None
    return Exchange(owner.process_set, "hvd_ckpt.tied")


def _part(one: Tied, exchange: Exchange) -> Tensor:
    """This replica's part of the gradient, added up over all replicas."""
    parameter = one.parameter
    padded = exchange.ranks * -(-parameter.numel() // exchange.ranks)
    flat = torch.zeros(padded, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        flat[: parameter.numel()] = parameter.grad.reshape(-1)
    return exchange.reduce_scatter(flat, one.name).wait(f"the gradient of '{one.name}' on all replicas")


def _in_place(part: Tensor, parameter: Tensor, exchange: Exchange) -> Tensor:
    """A gradient of zeros with this replica's part where it belongs."""
    flat = torch.zeros(exchange.ranks * len(part), dtype=parameter.dtype, device=parameter.device)
    flat[exchange.rank * len(part) : (exchange.rank + 1) * len(part)] = part
    return flat[: parameter.numel()].view(parameter.shape)


def digest(tensor: Tensor) -> int:
    """A fingerprint of the values of a parameter that stages share."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return 0 if tensor.is_meta else zlib.crc32(whole.view(torch.uint8).numpy().data)
