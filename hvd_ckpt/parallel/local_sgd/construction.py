"""Construction of an optimizer of local SGD: validation of arguments, groups of ranks, then the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.collectives.process_sets import process_sets_of, rank_groups, release
from hvd_ckpt.distributed.optimizer import DistributedOptimizer
from hvd_ckpt.distributed.shard import Shard, takes_shard
from hvd_ckpt.parallel.local_sgd.averaging import Averaging
from hvd_ckpt.parallel.local_sgd.optimizer import LocalOptimizer, add_averages
from hvd_ckpt.parallel.local_sgd.options import LocalOptions
from hvd_ckpt.parallel.local_sgd.schedule import assign_fragments
from hvd_ckpt.parallel.local_sgd.weights import Outer
from hvd_ckpt.reduction.construction import agree_at_construction, name_parameters
from hvd_ckpt.sharding.construction import start_alike


@takes_shard
def LocalSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    every: int = 100,
    outer: Outer | None = None,
    moments: str = "local",
    fragments: int = 1,
    delay: int = 0,
    wire: str = "fp32",
    within: str | Sequence[Sequence[int]] | None = None,
    shard: Shard | str | int = "none",
    model: torch.nn.Module | None = None,
    process_set: Any = global_process_set,
    elastic: bool = False,
) -> LocalOptimizer:
    """Wraps an optimizer so that ranks step on their own gradients, and average their parameters every ``every`` steps.

    This is local SGD (McMahan et al. 2017; Lin et al. 2018), and with ``outer=Nesterov()`` DiLoCo (Douillard et al. 2023): the
    mean change of the parameters since the last average (the anchor) is the gradient of an outer step. Periods are counted in
    steps, not in time, so a run repeats bit for bit. All ranks start with the weights of rank 0 (and its buffers, if the model is
    known). Collective.

    Every rank must call ``step()`` equally often. A rank without data calls it without gradients, and has weight 0 in the average.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state is kept. Afterwards, use the returned optimizer instead.
        named_parameters: ``model.named_parameters()``. It must name every parameter of the optimizer, and may name more.
        every: steps between two averages of a parameter.
        outer: makes the outer optimizer from a list of parameters: ``Nesterov(...)``, or an element-wise optimizer of
            ``torch.optim``, such as ``functools.partial(torch.optim.SGD, lr=0.7)``. With None, ranks use the mean.
        moments: the wrapped optimizer's state. ``"local"`` keeps it separate on each rank, ``"average"`` averages it with the
            parameters.
        fragments: number of parts of the model that are averaged in turn, evenly spread over ``every`` steps (Streaming DiLoCo,
            2025).
        delay: number of steps between the start of an average and its application, at most ``every``. Communication overlaps with
            these steps, and a rank keeps the updates of these steps.
        wire: communication format of changes of parameters: ``"fp32"`` (unchanged), ``"fp16"``, ``"bf16"``, ``"int8"``. Rounding
            errors are added to the next change. Moments and buffers are sent unchanged.
        within: groups of ranks whose gradients are reduced in every step, as by :func:`DistributedOptimizer`: None (each rank by
            itself), ``"host"``, or a list of lists of ranks, of equal length. Averages are between groups.
        shard: the states that are split over the ranks of a group, as in :func:`DistributedOptimizer`; of :class:`hvd_ckpt.Shard`
            only with ``offload`` and ``offload_folder``.
        model: the module whose floating-point buffers are averaged (and parameters split). By default, it is the module whose
            ``named_parameters()`` is given.
        process_set: the ranks that take part; a rank outside of it steps on its own.
        elastic: must be True in an elastic job. The program must then create the optimizer again after each change of ranks, in
            the function that ``hc.elastic.run`` calls. The weights must be those of a commit that was taken when
            ``optimizer.in_sync``.

    Returns:
        An optimizer that is also an instance of the wrapped one's class.

    Raises:
        ValueError: an argument is invalid, or arguments differ between ranks; raised on every rank.
        OSError: the disk or memory for offloaded state is full; raised on every rank.
    """
    options = LocalOptions(**{**locals(), "shard": Shard.of(shard)}).resolved()
    error: Exception | None = None
    named: list[tuple[str, torch.Tensor]] = []
    try:
        options.check()
        named, _ = name_parameters(optimizer, options.named_parameters)
        # Only for its error, which belongs to those that all ranks raise together below.
        assign_fragments([name for name, _ in named], fragments)
    except Exception as exception:  # whatever it is, this rank must not miss the comparison below
        error, named = exception, []
    identity, named = agree_at_construction("LocalSGD", error, named, options.described(), process_set)
    own_parameters = {id(parameter) for _, parameter in named}
    pairs = [*named, *(pair for pair in options.named_parameters or () if id(pair[1]) not in own_parameters)]
    if not process_set.included():
        # Outside of the set, too, since all ranks compare their arguments there.
        distributed = DistributedOptimizer(optimizer, pairs, process_set=process_set)
        return add_averages(distributed, process_set)

    prefix, model = f"hvd_ckpt.local.{identity}", options.model
    groups = rank_groups(within, process_set, f"{prefix}.hosts")
    members = next(group for group in groups if mpi_ops.rank() in group)
    start_alike(named, model, process_set, f"{prefix}.start")
    sets, added = process_sets_of(groups, process_set)
    positions = {rank: position for position, rank in enumerate(ranks_of(process_set))}
    places = [[positions[rank] for rank in group] for group in groups]
    # One rank alone has nothing to split.
    shard = options.shard if len(members) > 1 else "none"
    try:
        distributed = DistributedOptimizer(
            optimizer, pairs, process_set=sets[tuple(members)], model=model, shard=shard
        )
        new = add_averages(distributed, process_set)
        new.begin_averages(Averaging(new, options, places, prefix), added)
        return new
    except Exception:  # raised on all ranks
        release(added)
        raise
