"""``DistributedOptimizer``: Horovod's interface, with gradients reduced once and in a fixed order, and optional sharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.mpi_ops import Adasum, Average, global_process_set

from hvd_ckpt.distributed.options import Options, is_process_set
from hvd_ckpt.distributed.shard import Shard, takes_shard
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.communicator import Compression
from hvd_ckpt.reduction.construction import (
    agree_at_construction,
    check_not_split,
    name_parameters,
    warn_of_unsynchronized,
)
from hvd_ckpt.reduction.optimizer import DEFAULT_BUCKET_CAP_MB, ReducedOptimizer
from hvd_ckpt.reduction.wrapping import register, wrapping

if TYPE_CHECKING:
    from hvd_ckpt.distributed.extension import Extension


@takes_shard
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
    shard: Shard | str | int = "none",
    model: torch.nn.Module | None = None,
    replicas: int | None = None,
) -> ReducedOptimizer:
    """Wraps an optimizer so that ``step()`` works on gradients reduced over all ranks, each once and in a fixed order.

    The arguments up to ``process_set`` are those of ``horovod.torch.DistributedOptimizer``, with the same meaning. Any number of
    backward passes may precede a ``step()``. A parameter may be used any number of times, in recomputed segments or not: the
    optimizer learns how often each gradient accumulates, and reduces late gradients as well. Collective: call it on every rank.

    A parameter may be in several optimizers. Each gradient is reduced once, by the optimizer that was created last. Create an
    optimizer before the backward pass: gradients that an older optimizer of the same parameters has not reduced yet are dropped.

    With ``shard`` the states of the model are split over the ranks (ZeRO, Rajbhandari et al. 2020), and ``step()`` updates this
    rank's pieces of the parameters. All ranks start with the weights of rank 0; if the whole model is known, this includes its
    buffers.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state is kept. Afterwards, use the returned optimizer instead. With
            ``shard``, the optimizer must update each element by itself (see ``elementwise`` of :class:`hvd_ckpt.Shard`).
        named_parameters: ``model.named_parameters()``. It must name every parameter of the optimizer, and may name more.
        compression: ``Compression.none``, ``Compression.fp16``, or a class with ``compress`` and ``decompress``, applied to whole
            buckets. For sharded gradients, use ``wire`` of :class:`hvd_ckpt.Shard` instead.
        backward_passes_per_step: for sharded gradients, the number of backward passes that each rank adds up, in whole gradients,
            before they are reduced. The default reduces every pass and keeps only the shard. With all passes of a step, the sums
            are those of a run without sharding. Without sharded gradients, the number is learned, and the argument has no effect.
        op: ``Average``, ``Sum``, ``Adasum`` (combines updates; needs MPI), or ``Min``, ``Max``, ``Product``. With ``shard``, only
            the first two are allowed.
        gradient_predivide_factor: with ``Average``, a factor f: gradients are divided by f before the sum and by size / f after
            it.
        num_groups, groups: the number of buckets, or the parameters of each, in place of ``bucket_cap_mb``. Not at stages 2 and 3.
        sparse_as_dense: whether to reduce sparse gradients as dense ones. Sharded gradients always are.
        process_set: the ranks to reduce over; a rank outside it steps on its own gradients.
        bucket_cap_mb: size of a bucket in MiB.
        keep_buckets: whether to keep the storage of buckets between steps (faster), or to free it with the gradients.
        shard: what is split over the ranks: ``"none"``, ``"optimizer"``, ``"gradients"``, ``"parameters"``, or with options
            :class:`hvd_ckpt.Shard`.
        model: the module whose parameters are split; ``shard="parameters"`` and ``replicas`` need it. By default, it is the module
            whose ``named_parameters()`` is given.
        replicas: number of logical replicas, a power of two. Any power of two of ranks up to this number then computes the same
            bits. Each step iterates over ``optimizer.local_replicas()``. Needs ``model`` and ``op=Average`` over all ranks. Can be
            combined with ``shard="optimizer"`` and ``"gradients"``.

    Returns:
        An optimizer that is also an instance of the wrapped one's class.

    Raises:
        ValueError: an argument is invalid, or parameters differ between ranks (name, shape, dtype, number, ``requires_grad``). The
            error is raised on every rank and names the first difference.
    """
    # The first statement, so that locals() has the arguments and nothing else.
    options = Options(**{**locals(), "shard": Shard.of(shard)}).resolved()
    error: Exception | None = None
    named: Sequence[tuple[str, torch.Tensor]] = []
    known_names: Any = None
    extension: Extension | None = None
    try:
        options.check()
        if not options.are_plain:  # a plain optimizer needs none of sharding, planning and recomputation
            from hvd_ckpt.distributed.extension import Extension

            extension = Extension(options)
        named, known_names = name_parameters(optimizer, named_parameters)
        check_not_split(named)
        if extension is not None:
            named = extension.parameters(named)
    except Exception as exception:  # whatever it is, this rank must not miss the comparison below
        error, named = exception, []
    identity, named = agree_at_construction(
        "DistributedOptimizer",
        error,
        named,
        options.described(known_names),
        process_set if is_process_set(process_set) else global_process_set,
        derived={} if extension is None else extension.described(),
    )

    if options.model is not None:
        warn_of_unsynchronized(options.model)
    member = bool(process_set.included())
    # A single rank needs no reducer, unless other ranks may join it: an optimizer does not get one later.
    reduces = member and (process_set.size() > 1 or (is_elastic() and process_set is global_process_set))
    methods = ReducedOptimizer
    # A rank outside the process set has nothing to split and nothing to reduce: it steps on its own.
    if extension is not None and member:
        methods = extension.methods
    elif op == Adasum and reduces:
        from hvd_ckpt.reduction.adasum import AdasumOptimizer

        methods = AdasumOptimizer
    new = wrapping(optimizer, methods)
    new.identity, new.process_set, new.compression = identity, process_set, compression
    new.parameter_names, new.known_names = {parameter: name for name, parameter in named}, known_names
    new.backward_passes_per_step = backward_passes_per_step
    if member:
        if extension is not None:
            extension.add(new, named)
        if new.reducer is None and reduces:
            from hvd_ckpt.reduction.reducer import Reducer

            how = options.assignment(named), options.communicator(), identity, sparse_as_dense, keep_buckets
            new.reducer = Reducer(*how)
        register(new)
    result: ReducedOptimizer = new
    return result
