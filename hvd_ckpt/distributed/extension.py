"""Shards and logical replicas of a ``DistributedOptimizer``: checked, compared, and added to the optimizer.

Loaded by :func:`hvd_ckpt.distributed.optimizer.extension_of`, where an option asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import Average, global_process_set

from hvd_ckpt.distributed.replicas import Replicas, check_replicas
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.construction import check_not_split
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.tree import ReplicaReducer, TreeCommunicator
from hvd_ckpt.sharding.construction import ShardOptions, shard_optimizer, shard_options
from hvd_ckpt.sharding.formats import FP32
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.sharding.options import Options
from hvd_ckpt.sharding.replicas import ShardedTreeCommunicator, ShardReplicaReducer
from hvd_ckpt.sharding.units import check_memory

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
        self._shards = shard_options(options)
        if options.replicas is not None:
            check_replicas(options.replicas, options.process_set.size(), options.model)
            _check_replica_options(options, self._shards)

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
        """What follows from the options, and must be equal on all ranks."""
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
        tree = TreeCommunicator.of(number, process_set)
        if optimizer.shard_stage > 1:
            layout, exchange = optimizer.sharding.layout, optimizer.sharding.exchange
            parts = ShardedTreeCommunicator(**vars(tree), layout=layout, exchange=exchange)
            optimizer.reducer = ShardReplicaReducer(parts, identity)
        else:
            optimizer.reducer = ReplicaReducer(assign(), tree, identity)
        # Under names of its own: a mean of losses may be on its way beside the gradients.
        means = dataclasses.replace(tree, name=f"hvd_ckpt.{identity}.replicas")
        seed = broadcast_from(torch.initial_seed(), 0, process_set, f"hvd_ckpt.{identity}.seed")
        optimizer.replicas = Replicas(number, model, optimizer.reducer, means, seed)


def _check_replica_options(options: Options, sharding: ShardOptions | None) -> None:
    """Raises ValueError for the first argument that does not go with replicas."""
    if current().stages > 1:
        raise ValueError(
            f"replicas cannot be used in {current().stages} pipeline stages, whose micro-batches are not those of replicas; leave "
            f"replicas out, or use init(stages=1)"
        )
    if current().tensor > 1:
        raise ValueError(
            f"replicas cannot be used with tensor={current().tensor}, which splits layers; leave replicas out, or use "
            f"init(tensor=1)"
        )
    if (options.op, options.gradient_predivide_factor, options.compression) != (
        Average,
        1.0,
        Compression.none,
    ):
        raise ValueError("replicas needs op=Average, gradient_predivide_factor=1.0 and Compression.none")
    if options.process_set != global_process_set:
        raise ValueError("replicas works on all ranks only, not on a process set")
    if sharding is not None and sharding.stage > 2:
        raise ValueError("replicas needs shard='none', 'optimizer' or 'gradients'")
    if sharding is not None and not sharding.master_weights:
        raise ValueError(
            "replicas and shard need master_weights: where a half-precision tensor ends, PyTorch rounds its last elements in "
            "another way, so steps of shards would depend on the number of ranks"
        )
    if sharding is not None and not (sharding.gradients is sharding.parameters is FP32):
        raise ValueError(
            "replicas needs wire='fp32': other formats round what travels, on several ranks only"
        )
