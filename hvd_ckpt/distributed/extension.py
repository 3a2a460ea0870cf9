"""Shards and logical replicas of a ``DistributedOptimizer``: checked, compared, and added to the optimizer.

Loaded by :func:`hvd_ckpt.distributed.optimizer.extension_of`, where an option asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.distributed.options import Options
from hvd_ckpt.distributed.replicas import Replicas, check_replicas
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.reduction.construction import check_not_split
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.process_sets import check_within, hosts_of
from hvd_ckpt.sharding.construction import ShardOptions, check_stage, shard_optimizer
from hvd_ckpt.sharding.elementwise import check_elementwise
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.sharding.replicas import ReplicaReducer, ShardReplicaReducer
from hvd_ckpt.sharding.tree import TreeCommunicator
from hvd_ckpt.sharding.units import check_memory, find_units

Named = Sequence[tuple[str, torch.Tensor]]


class Extension:
    """Shards, logical replicas, or both.

    Args:
        options: at least one of them asks for it.

    Raises:
        ValueError, TypeError: for the first argument that is wrong on this rank.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._shards = _shard_options(options)
        if options.replicas is not None:
            check_replicas(options.replicas, options.process_set.size(), options.model)

    @property
    def methods(self) -> type[ReducedOptimizer]:
        """The class whose methods the optimizer gets."""
        return ReducedOptimizer if self._shards is None else ShardedOptimizer

    @property
    def reduces(self) -> bool:
        """Whether the optimizer has a reducer of its own in place of the plain one."""
        return self._options.replicas is not None or (self._shards is not None and self._shards.stage > 1)

    def parameters(self, named: Named) -> Named:
        """All parameters that take part, given those of the optimizer.

        Raises:
            ValueError: one cannot be split.
        """
        if self._shards is None:
            return named
        named = self._shards.all_parameters(named)
        check_not_split(named)
        check_memory(named, () if self._shards.model is None else self._shards.model.named_parameters())
        return named

    def described(self) -> Mapping[str, Any]:
        """Values that follow from the options, and must be equal on all ranks."""
        return {} if self._shards is None else self._shards.described()

    def add(self, optimizer: ReducedOptimizer, named: Named, assign: Callable[[], BucketAssignment]) -> None:
        """Splits what the options say, and adds replicas. Collective.

        Args:
            assign: makes the assignment of ``named`` to buckets.
        """
        if self._shards is not None:
            shard_optimizer(optimizer, named, self._shards)  # type: ignore[arg-type]  # its methods are those
        if self._options.replicas is not None:
            self._add_replicas(optimizer, assign)

    def _add_replicas(self, optimizer: Any, assign: Callable[[], BucketAssignment]) -> None:
        number, model = self._options.replicas, self._options.model
        assert number is not None and model is not None
        identity, process_set = optimizer.identity, optimizer.process_set
        if optimizer.shard_stage > 1:
            sharding = optimizer.sharding
            optimizer.reducer = ShardReplicaReducer(number, sharding.layout, sharding.exchange)
            optimizer.reducer.rename(identity, 0)
        else:
            whole = TreeCommunicator(number, process_set)
            whole.exchange.hosts = hosts_of(process_set, f"hvd_ckpt.{identity}.levels")
            optimizer.reducer = ReplicaReducer(assign(), whole, identity)
        # Under names of its own: a mean of losses may be on its way beside the gradients.
        means = TreeCommunicator(number, process_set)
        means.rename(f"hvd_ckpt.{identity}.replicas")
        seed = broadcast_from(torch.initial_seed(), 0, process_set, f"hvd_ckpt.{identity}.seed")
        optimizer.replicas = Replicas(number, model, optimizer.reducer, means, seed)


def _shard_options(given: Options) -> ShardOptions | None:
    """The options of a sharded optimizer, or None for stage 0.

    Raises:
        ValueError, TypeError: for the first argument that is wrong.
    """
    shard = given.shard
    stage, gradients, parameters = check_stage(shard.states, shard.offload, shard.wire, given.features())
    if stage == 0:
        return None
    check_elementwise(given.optimizer, shard.elementwise)
    model = given.model
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    return ShardOptions(
        stage=stage,
        model=model,
        units=find_units(model, shard.units) if stage == 3 and model is not None else (),
        offload=shard.offload,
        offload_folder=None if shard.offload_folder is None else Path(shard.offload_folder),
        gradients=gradients,
        parameters=parameters,
        master_weights=shard.master_weights is not False,
        within=check_within(shard.within),
        bucket_bytes=given.bucket_cap_mb * MEBIBYTE,
        op=given.op,
        prescale=given.prescale,
    )
