"""``DistributedOptimizer``: Horovod's, whose gradients are reduced once and in a fixed order, and whose states may be sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.mpi_ops import Average, global_process_set

from hvd_ckpt.distributed.options import Options
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.agreement import described
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.reduction.construction import (
    agree_at_construction,
    check_not_split,
    describe_groups,
    is_elastic,
    name_parameters,
    warn_of_unsynchronized,
)
from hvd_ckpt.reduction.optimizer import DEFAULT_BUCKET_CAP_MB, ReducedOptimizer
from hvd_ckpt.reduction.reducer import Reducer
from hvd_ckpt.reduction.wrapping import register, wrapping

if TYPE_CHECKING:
    from hvd_ckpt.distributed.extension import Extension


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
    # The first statement, so that locals() has the arguments and nothing else.
    options = Options(**locals()).resolved()
    error: Exception | None = None
    named: Sequence[tuple[str, torch.Tensor]] = []
    known_names: Any = None
    extension: Extension | None = None
    try:
        options.check()
        extension = extension_of(options)
        named, known_names = name_parameters(optimizer, named_parameters)
        check_not_split(named)
        if extension is not None:
            named = extension.parameters(named)
    except Exception as exception:  # whatever it is, this rank must not miss the comparison below
        error, named = exception, []
    names_of_groups = described(groups=describe_groups(options.groups, known_names))
    identity, named = agree_at_construction(
        "DistributedOptimizer",
        error,
        named,
        options.described() | names_of_groups,
        process_set,
        derived={} if extension is None else extension.described(),
    )

    if options.model is not None:
        warn_of_unsynchronized(options.model)
    member = bool(process_set.included())
    # A rank outside the process set has nothing to split and nothing to reduce: it steps on its own.
    new = wrapping(optimizer, ReducedOptimizer if extension is None or not member else extension.methods)
    communicator = options.communicator()
    new.begin_reduction(communicator, identity, named, known_names)
    new.backward_passes_per_step = backward_passes_per_step
    if member:
        assign = functools.partial(BucketAssignment, named, bucket_cap_mb * MEBIBYTE, options.groups)
        if extension is not None:
            extension.add(new, named, assign)
        # A single rank needs no reducer, unless other ranks may join it: an optimizer does not get one later.
        may_grow = is_elastic() and process_set is global_process_set
        if (extension is None or not extension.reduces) and (process_set.size() > 1 or may_grow):
            new.reducer = Reducer(assign(), communicator, identity, sparse_as_dense, keep_buckets)
        register(new)
    result: ReducedOptimizer = new
    return result


def extension_of(options: Options) -> Extension | None:
    """The shards and logical replicas that options ask for.

    The one import within a function: a plain optimizer needs none of sharding, planning and recomputation.
    """
    if options.are_plain:
        return None
    from hvd_ckpt.distributed.extension import Extension

    return Extension(options)
