"""``DistributedOptimizer``: Horovod's, whose gradients are reduced once and in a fixed order, and whose states may be sharded."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from horovod.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum, global_process_set

from hvd_ckpt.batchnorm.synchronized import warn_of_unsynchronized
from hvd_ckpt.distributed.replicas import Replicas, check_replicas
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.agreement import broadcast_from, described
from hvd_ckpt.reduction.buckets import MEBIBYTE, BucketAssignment
from hvd_ckpt.reduction.communicator import Communicator
from hvd_ckpt.reduction.construction import (
    agree_at_construction,
    check_options,
    describe_groups,
    is_elastic,
    name_parameters,
)
from hvd_ckpt.reduction.optimizer import DEFAULT_BUCKET_CAP_MB, ReducedOptimizer
from hvd_ckpt.reduction.reducer import Reducer
from hvd_ckpt.reduction.tree import ReplicaReducer, TreeCommunicator
from hvd_ckpt.reduction.wrapping import register, wrapping
from hvd_ckpt.sharding import stage_name
from hvd_ckpt.sharding.construction import ShardOptions, check_shard_options, model_of, shard_optimizer
from hvd_ckpt.sharding.formats import FP32
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.sharding.replicas import ShardedTreeCommunicator, ShardReplicaReducer
from hvd_ckpt.sharding.units import check_memory, check_not_split

OPERATIONS = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[torch.Tensor]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
    keep_buckets: bool = True,
    shard: str | int = "none",
    model: torch.nn.Module | None = None,
    units: Sequence[torch.nn.Module | Sequence[torch.nn.Module]] | None = None,
    offload: str | None = None,
    offload_folder: str | Path | None = None,
    wire: str | Mapping[str, str] = "fp32",
    master_weights: bool | None = None,
    elementwise: bool = False,
    replicas: int | None = None,
    within: str | Sequence[Sequence[int]] | None = None,
) -> ReducedOptimizer:
    """Wraps an optimizer so that ``step()`` works on gradients reduced over all ranks, each once and in a fixed order.

    The arguments up to ``process_set`` are those of ``horovod.torch.DistributedOptimizer``, with the same meaning. Any number
    of backward passes may precede a ``step()``, and a parameter may be used any number of times, in recomputed segments or not:
    what is to come is learned, and what comes late is reduced as well. Collective: to be called on every rank.

    A parameter may be in several optimizers; each gradient is reduced once, by the one that was made or synchronized last. Make an
    optimizer before the backward pass: gradients that an older one of the same parameters has not reduced yet are dropped.

    With ``shard`` the model's states are split over the ranks (ZeRO, Rajbhandari et al. 2020), weights (of the whole model with its
    buffers, where it is known) are rank 0's from the start, and ``param_groups`` hold this rank's pieces of the parameters.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state is kept. Use the returned one instead of it from now on. To shard, one
            that works on each element by itself (see ``elementwise``).
        named_parameters: ``model.named_parameters()``; must name every parameter of the optimizer, may name more.
        compression: ``Compression.none``, ``Compression.fp16``, or a class with ``compress`` and ``decompress``; applied to
            whole buckets. Where gradients are sharded, use ``wire``.
        backward_passes_per_step: where gradients are sharded, how many backward passes are added up on each rank, in full, before
            they are reduced. The default reduces every pass and keeps the shard only; with all passes of a step the sums are
            those of a run that is not sharded. Elsewhere accepted for compatibility; the number is learned.
        op: ``Average``, ``Sum``, ``Adasum`` (combines updates; needs MPI), or ``Min``, ``Max``, ``Product``; to shard, one of the
            first two.
        gradient_predivide_factor: with ``Average``, divide by this before the sum and by size / this after it.
        num_groups, groups: reduce in this many buckets, or in these, instead of by ``bucket_cap_mb``; not at stages 2 and 3.
        sparse_as_dense: reduce sparse gradients as dense ones; where gradients are sharded they always are.
        process_set: the ranks to reduce over; a rank outside it steps on its own gradients.
        bucket_cap_mb: size of a bucket in MiB.
        keep_buckets: keep the storage of buckets between steps (faster); False frees it with the gradients.
        shard: what is split over the ranks: ``"none"``, ``"optimizer"`` (its state), ``"gradients"`` (these, too),
            ``"parameters"`` (these, too); or the stage, 0 to 3.
        model: the module whose parameters are split (``shard="parameters"``); by default the one whose ``named_parameters()``
            is given.
        units: its modules, or lists of them, whose parameters are gathered together; by default the segments that are
            recomputed, else the blocks of the model. All other parameters are a unit of their own.
        offload: ``"optimizer"`` keeps the optimizer's state in pinned host memory for a GPU, and with master weights in
            memory-mapped files for a CPU. ``"parameters"``, with ``shard="parameters"``, also the shards of parameters and
            gradients: memory then holds the units that run. :func:`hvd_ckpt.init_on_disk` makes a model that is larger than memory.
        offload_folder: where these files are; by default the temporary folder.
        wire: format in which shards travel: ``"fp32"`` (as they are), ``"fp16"``, ``"bf16"``, ``"int8"``, ``"int4"`` (gradients in
            4 bits, parameters in 8); or ``{"gradients": ..., "parameters": ...}``, one for each.
        master_weights: keep float32 copies of half-precision parameters in the shards and step those; by default where there
            are any.
        elementwise: promises that an optimizer which is not one of torch.optim's own updates each element from its value,
            gradient and state alone, so that shards can be stepped.
        replicas: a number of logical replicas, a power of two; any smaller power of two of ranks then computes the same bits.
            Each step goes through ``optimizer.local_replicas()``. Needs the model, as ``shard="parameters"`` does, and
            ``op=Average`` over all ranks; goes with ``shard="optimizer"`` and ``"gradients"``.
        within: with ``shard="parameters"``, groups of ranks that keep a second copy of the parameters, split over the group:
            ``"host"``, or lists of ranks of equal size. After a step each parameter is gathered from all ranks once, and in the
            backward pass and further passes within the group (hpZ of ZeRO++).

    Returns:
        An optimizer that is also an instance of the wrapped one's class.

    Raises:
        ValueError: arguments are wrong, or parameters differ between ranks (name, shape, dtype, number, ``requires_grad``);
            raised on every rank, naming the first one.
    """
    error: Exception | None = None
    named: list[tuple[str, torch.Tensor]] = []
    known_names: Any = None
    sharding: ShardOptions | None = None
    member = bool(process_set.included())
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    if model is None:
        model = model_of(named_parameters)
    options = described(
        optimizer=optimizer,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=OPERATIONS.get(op, op),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        bucket_cap_mb=bucket_cap_mb,
        keep_buckets=keep_buckets,
        shard=stage_name(shard),
        units=units,
        offload=offload,
        wire=wire,
        master_weights=master_weights,
        elementwise=elementwise,
        replicas=replicas,
        within=within,
        model=None if replicas is None and stage_name(shard) == "none" else model,
    )
    try:
        if isinstance(optimizer, ReducedOptimizer):
            raise ValueError(
                "optimizer is a DistributedOptimizer already; wrap the bare torch.optim optimizer once"
            )
        check_options(
            optimizer,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups,
            process_set,
            bucket_cap_mb,
        )
        sharding = check_shard_options(
            optimizer,
            shard,
            op,
            compression,
            groups,
            named_parameters,
            model,
            units,
            offload,
            offload_folder,
            wire,
            master_weights,
            elementwise,
            within,
            process_set,
        )
        if replicas is not None:
            check_replicas(replicas, process_set.size(), model)
            check_replica_options(op, gradient_predivide_factor, compression, process_set, sharding)
        named, known_names = name_parameters(optimizer, named_parameters)
        if sharding is not None:
            named = sharding.all_parameters(named)
        check_not_split(named)
        if sharding is not None:
            check_memory(named, () if sharding.model is None else sharding.model.named_parameters())
    except Exception as exception:  # whatever it is, this rank must not miss the resynchronization below
        error, named = exception, []
    identity, named = agree_at_construction(
        "DistributedOptimizer",
        error,
        named,
        options | described(groups=describe_groups(groups, known_names)),
        process_set,
        {} if sharding is None else sharding.described(),
    )

    if model is not None:
        warn_of_unsynchronized(model)
    new: Any = wrapping(optimizer, ShardedOptimizer if member and sharding is not None else ReducedOptimizer)
    new._parameter_names = {parameter: name for name, parameter in named}
    new._known_names = known_names
    new._identity = identity
    new._op, new._compression, new._process_set = op, compression, process_set
    new.backward_passes_per_step = backward_passes_per_step
    if member:
        prescale = 1.0 / gradient_predivide_factor if op == Average else 1.0
        if sharding is not None:
            shard_optimizer(new, named, sharding, bucket_cap_mb, prescale)
        may_grow = is_elastic() and process_set is global_process_set
        assign = functools.partial(BucketAssignment, named, bucket_cap_mb * MEBIBYTE, groups)
        if replicas is not None:
            assert model is not None
            _add_replicas(new, replicas, model, assign)
        elif (sharding is None or sharding.stage == 1) and (process_set.size() > 1 or may_grow):
            postscale = gradient_predivide_factor if op == Average else 1.0
            communicator = Communicator("", op, prescale, postscale, compression, process_set)
            new._reducer = Reducer(assign(), communicator, identity, sparse_as_dense, keep_buckets)
        register(new)
    result: ReducedOptimizer = new
    return result


def _add_replicas(
    new: Any, number: int, model: torch.nn.Module, assign: Callable[[], BucketAssignment]
) -> None:
    """Gives a new optimizer logical replicas and the reducer of their gradients. Collective."""
    identity, process_set = new._identity, new._process_set
    tree = TreeCommunicator.of(number, process_set)
    if new.shard_stage > 1:
        shards = new._sharding
        parts = ShardedTreeCommunicator(**vars(tree), layout=shards.layout, exchange=shards.exchange)
        new._reducer = ShardReplicaReducer(parts, identity)
    else:
        new._reducer = ReplicaReducer(assign(), tree, identity)
    means = dataclasses.replace(tree, name=f"hvd_ckpt.{identity}.replicas")
    seed = broadcast_from(torch.initial_seed(), 0, process_set, f"hvd_ckpt.{identity}.seed")
    new.replicas = Replicas(number, model, new._reducer, means, seed)


def check_replica_options(
    op: int, predivide: float, compression: Any, process_set: Any, sharding: ShardOptions | None
) -> None:
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
    if op != Average or predivide != 1.0 or compression is not Compression.none:
        raise ValueError("replicas needs op=Average, gradient_predivide_factor=1.0 and Compression.none")
    if process_set != global_process_set:
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
