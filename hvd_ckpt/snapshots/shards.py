"""Shards: what a rank writes of state that is sharded over the ranks, and where the ranks' shards lie in the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.schema import Strict
from hvd_ckpt.snapshots.schema import Sharding, ShardMetadata, TensorMetadata

__all__ = ["RankShards", "RunShards", "ShardState", "merged", "parameters_of"]


class RankShards(Strict):
    """One rank's part of :class:`~hvd_ckpt.snapshots.schema.Sharding`."""

    stage: int
    parameters: dict[str, TensorMetadata]
    optimizer: tuple[ShardMetadata, ...]
    weights: tuple[ShardMetadata, ...] | None


@dataclass(frozen=True)
class ShardState:
    """What a rank of a sharded run writes besides its per-rank state.

    Attributes:
        shards: where its shards are.
        aliases: further names of tied parameters, and the name under which each is in ``shards.parameters``.
        state: of the optimizer, ``{"state", "param_groups"}``, with ``"master_weights"`` and ``"averages"`` by number of the shard.
        weights: its shards of the exact weights, by parameter; None where the model's own are exact and whole.
    """

    shards: RankShards
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None


class RunShards:
    """Makes the :class:`ShardState` of a run. To be made before the optimizer is distributed.

    Args:
        model: with whole parameters.
        stage: from 0 to 3; at 0 nothing is sharded.
        lossy: whether weights are communicated in fewer bits than they have.
    """

    def __init__(self, model: nn.Module, stage: int, lossy: bool) -> None:
        self.stage = stage
        self._parameters, self._aliases = parameters_of(model)
        self._buffers = [
            name for name in model.state_dict() if name not in {*self._parameters, *self._aliases}
        ]
        self._splits_weights = stage == 3 or (stage > 0 and lossy)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights that rank 0 writes: ``model.state_dict()``, or only buffers where shards have the exact weights."""
        if not self._splits_weights:
            return model.state_dict()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {name: buffers[name] for name in self._buffers}

    def state(self, optimizer: Any, averages: Mapping[int, Tensor] | None) -> ShardState | None:
        """The shards that this rank writes, not copied; None where nothing is sharded.

        Args:
            optimizer: a ``DistributedOptimizer``.
            averages: of the weights, by number of the shard.
        """
        if not self.stage:
            return None
        part = optimizer.state_dict()
        state = {name: part[name] for name in ("state", "param_groups", "master_weights") if name in part}
        if averages is not None:
            state["averages"] = dict(averages)
        pieces = optimizer.weight_pieces() if self._splits_weights else None
        shards = RankShards(
            stage=self.stage,
            parameters=self._parameters,
            optimizer=ShardMetadata.of(part["pieces"]),
            weights=None if pieces is None else ShardMetadata.of(piece[:3] for piece in pieces),
        )
        weights = None if pieces is None else {name: values for name, _, _, values in pieces}
        return ShardState(shards, self._aliases, state, weights)

    def broadcast_weights(self, optimizer: Any) -> None:
        """Gives the model the weights it had after the last step, which lossy communication made of the exact ones. Collective."""
        if self._splits_weights and self.stage < 3:
            store, layout = optimizer._sharding.store, optimizer._sharding.layout
            store.publish([group for group in layout.groups if group.requires_grad])


def parameters_of(model: nn.Module) -> tuple[dict[str, TensorMetadata], dict[str, str]]:
    """A model's parameters, and the further names of those that are tied."""
    first: dict[int, str] = {}
    parameters: dict[str, TensorMetadata] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters[name] = TensorMetadata.of(parameter)
    return parameters, aliases


def merged(ranks: list[RankShards | None]) -> Sharding | None:
    """The shards of all ranks, in their order; None where nothing is sharded.

    Raises:
        Wrong: the ranks do not shard the same things.
        pydantic.ValidationError: the shards are not those of whole parameters.
    """
    found = [one for one in ranks if one is not None]
    if not found:
        return None
    first = found[0]
    if len(found) < len(ranks) or any(
        (one.stage, one.weights is None) != (first.stage, first.weights is None) for one in found
    ):
        raise Wrong("ranks shard different things: give every rank the same settings")
    weights = tuple(one.weights for one in found if one.weights is not None)
    return Sharding(
        stage=first.stage,
        parameters=first.parameters,
        optimizer=tuple(one.optimizer for one in found),
        weights=None if first.weights is None else weights,
    )
