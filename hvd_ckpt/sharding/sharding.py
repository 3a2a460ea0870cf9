"""The parts of a sharded optimizer, and what remains of them after ``unshard()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.layout import Form, Group, Layout, Piece
from hvd_ckpt.sharding.offload import OptimizerOffload
from hvd_ckpt.sharding.parameters import Masters
from hvd_ckpt.sharding.reducer import ShardReducer

__all__ = ["Released", "Sharding", "bucket_bytes", "new_pieces"]

# The parts of a sharded optimizer: layout, collectives, weights, offload, and this rank's pieces of the parameters.
#
# :class:`.optimizer.ShardedOptimizer` steps them, and :mod:`.state` saves and loads them.


@dataclass
class Sharding:
    """The parts of a sharded optimizer.

    Attributes:
        stage: 1 to 3.
        layout: where everything lies.
        exchange: collectives.
        store: the weights.
        offload: where the optimizer's state is, if not beside the weights.
        forms: shape and strides of every parameter, by index.
        groups: the whole parameters of each of the optimizer's parameter groups.
        bucket_bytes: largest group of parameters that are added later.
        masters: float32 copies of half-precision weights.
        pieces: the parts of the parameters that this rank holds and updates.
    """

    stage: int
    layout: Layout
    exchange: Exchange
    store: Any
    offload: OptimizerOffload | None
    forms: list[Form]
    groups: list[list[torch.Tensor]]
    bucket_bytes: float
    masters: Masters
    pieces: list[Piece]

    def pieces_of(self, number: int) -> list[Piece]:
        """This rank's pieces of the optimizer's parameter group ``number``, in the order of its parameters."""
        spans = {
            span.parameter: (group, span)
            for group in self.layout.groups
            for span in group.spans(self.exchange.rank)
        }
        pieces = []
        for parameter in self.groups[number]:
            index = self.layout.index(parameter)
            assert index is not None
            if index not in spans:
                continue
            group, span = spans[index]
            weights = self.store.shards[group.position][span.offset : span.offset + span.numel]
            stepped = self.masters.part(group, span)
            pieces.append(
                Piece(
                    self.layout.names[index],
                    span.start,
                    span.stop,
                    span.offset,
                    self.forms[index],
                    number,
                    index,
                    torch.nn.Parameter(weights if stepped is None else stepped, parameter.requires_grad),
                    weights,
                )
            )
        return pieces

    def take_whole_gradients(self) -> None:
        """Stage 1: the pieces' gradients are parts of the parameters' own."""
        for piece in self.pieces:
            gradient = self.layout.parameters[piece.index].grad
            piece.parameter.grad = None if gradient is None else piece.of(gradient).to(piece.parameter.dtype)

    def take_gradient_shards(self, reducer: ShardReducer) -> None:
        """Stages 2 and 3: the pieces' gradients are parts of what the reducer holds."""
        for piece in self.pieces:
            group = self.layout.group_of[piece.index]
            shard = reducer.shard(group) if reducer.used[piece.index] else None
            end = piece.offset + piece.stop - piece.start
            piece.parameter.grad = (
                None if shard is None else shard[piece.offset : end].to(piece.parameter.dtype)
            )

    def drop_gradients(self) -> None:
        for piece in self.pieces:
            piece.parameter.grad = None

    def used_groups(self, used: Sequence[bool]) -> list[Group]:
        """The groups with a parameter that some rank has a gradient for; the same on every rank."""
        return [group for group in self.layout.groups if any(used[index] for index in group.indices)]

    def publish(self, used: Sequence[bool]) -> None:
        """After the step: the ranks see each other's weights."""
        self.masters.round_into(self.store.shards)
        self.store.publish(self.used_groups(used))


def new_pieces(sharding: Sharding) -> list[Piece]:
    """The pieces of all parameter groups."""
    return [piece for number in range(len(sharding.groups)) for piece in sharding.pieces_of(number)]


def bucket_bytes(bucket_cap_mb: float) -> float:
    """The largest group, in bytes."""
    return bucket_cap_mb * MEBIBYTE


class Released:
    """Has no groups and is of stage 0.

    Raises:
        RuntimeError: anything else is asked for.
    """

    stage = 0

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "this optimizer has given the model its parameters back in unshard(), and cannot be used any more; wrap a new torch "
            "optimizer with DistributedOptimizer"
        )
