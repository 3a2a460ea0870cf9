"""``LocalSGD`` and ``Nesterov``: checked arguments, groups of ranks, then the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.distributed.optimizer import DistributedOptimizer
from hvd_ckpt.local_sgd.averaging import Averaging
from hvd_ckpt.local_sgd.optimizer import LocalOptimizer, note_work
from hvd_ckpt.local_sgd.schedule import Moments, Schedule, assign_fragments, check_moments
from hvd_ckpt.local_sgd.weights import Outer
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import described
from hvd_ckpt.reduction.construction import agree_at_construction, is_elastic, name_parameters
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.process_sets import (
    check_within,
    process_sets_of,
    rank_groups,
    ranks_of,
    release,
)
from hvd_ckpt.sharding import stage_name, stage_of
from hvd_ckpt.sharding.construction import check_stage, model_of, start_alike
from hvd_ckpt.sharding.elementwise import check_elementwise
from hvd_ckpt.sharding.formats import INT4, wire_format
from hvd_ckpt.sharding.offload import Offload


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: SGD with Nesterov momentum.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.

    Raises:
        ValueError: one of them is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"Nesterov: lr must be greater than 0, not {self.lr!r}")
        if not 0 < self.momentum < 1:
            raise ValueError(f"Nesterov: momentum must lie between 0 and 1, not {self.momentum!r}")

    def __call__(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of some parameters."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=True)


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    every: int = 100,
    outer: Outer | None = None,
    moments: Moments = "local",
    fragments: int = 1,
    delay: int = 0,
    wire: str = "fp32",
    within: str | Sequence[Sequence[int]] | None = None,
    shard: str | int = "none",
    model: torch.nn.Module | None = None,
    process_set: Any = global_process_set,
    elastic: bool = False,
    offload: str | None = None,
    offload_folder: str | Path | None = None,
) -> LocalOptimizer:
    """Wraps an optimizer so that ranks step on their own gradients, and average their parameters every so many steps.

    Local SGD (McMahan et al. 2017; Lin et al. 2018), and with ``outer=Nesterov()`` DiLoCo (Douillard et al. 2023): the mean change
    of the parameters since the last average, the anchor, is the gradient of an outer step. Steps are counted, never time, so a run
    repeats bit for bit. Weights (and buffers, where the model is known) are rank 0's from the start. Collective.

    Every rank calls ``step()`` equally often; one without data calls it without gradients, and counts for nothing in the average.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state is kept. Use the returned one instead of it from now on.
        named_parameters: ``model.named_parameters()``; must name every parameter of the optimizer, may name more.
        every: steps between two averages of a parameter.
        outer: makes the outer optimizer from a list of parameters: ``Nesterov(...)``, or any of torch.optim's that works on each
            element by itself, such as ``functools.partial(torch.optim.SGD, lr=0.7)``. None: ranks take over the mean.
        moments: the wrapped optimizer's state: ``"local"`` stays each rank's own, ``"average"`` is averaged with the parameters; or
            steps by name, multiples of ``every``: ``{"exp_avg": 300, "exp_avg_sq": 600}`` (DES-LOC, 2025).
        fragments: averages the model's blocks in so many turns, evenly spread over ``every`` steps (Streaming DiLoCo, 2025).
        delay: steps from when an average leaves to when it is applied, during which it travels beside computation; at most
            ``every``. What a rank has learned meanwhile is kept on top.
        wire: format in which changes of parameters travel: ``"fp32"`` (as they are), ``"fp16"``, ``"bf16"``, ``"int8"``; what it
            rounds away is added to the next change. Moments and buffers travel as they are.
        within: groups of ranks whose gradients are reduced in every step, as by :func:`DistributedOptimizer`: None (each rank by
            itself), ``"host"``, or a list of lists of ranks, of equal length. Averages are between groups.
        shard: what is split over the ranks of a group, as in :func:`DistributedOptimizer`.
        model: the module whose buffers are averaged (and parameters split); by default the one whose ``named_parameters()`` is
            given.
        process_set: the ranks that take part; a rank outside it steps on its own.
        elastic: in an elastic job, the program makes the optimizer anew after each change of ranks, in the function that
            ``hc.elastic.run`` calls, with the weights of a commit that was taken when ``optimizer.settled``.
        offload: ``"optimizer"`` keeps what averages need between them (anchor, exact values, the outer optimizer's state, what a
            lossy wire has rounded away) in memory-mapped files for a CPU, in pinned host memory for a GPU, where the outer step is
            then on the CPU. With ``shard`` also what it says for :func:`DistributedOptimizer`, of the group.
        offload_folder: where these files are; by default the temporary folder.

    Returns:
        An optimizer that is also an instance of the wrapped one's class.

    Raises:
        ValueError: arguments are wrong, or differ between ranks; on every rank.
        OSError: there is no room for what is offloaded; on the other ranks a ValueError that names this one.
    """
    member = bool(process_set.included())
    model = model_of(named_parameters) if model is None else model
    pairs = None if named_parameters is None else list(named_parameters)
    error: Exception | None = None
    named: list[tuple[str, torch.Tensor]] = []
    options = described(
        optimizer=optimizer,
        every=every,
        outer=repr(outer) if isinstance(outer, Nesterov) else outer,
        moments=moments,
        fragments=fragments,
        delay=delay,
        wire=wire,
        within=within,
        shard=stage_name(shard),
        model=model,
        offload=offload,
    )
    try:
        _check(optimizer, outer, within, process_set, elastic)
        schedule = Schedule(every, fragments, delay)
        check_moments(moments, every)
        format = wire_format(wire)
        if format is INT4:
            raise ValueError(
                "wire='int4' is for sharded gradients: give 'int8' or a wider format for averages"
            )
        stage = check_stage(shard, offload if stage_of(shard) else None, "fp32")[0]
        if not stage and offload not in (None, "optimizer"):
            raise ValueError(f"offload must be None or 'optimizer' without shard, not {offload!r}")
        named, _ = name_parameters(optimizer, pairs)
        assign_fragments([name for name, _ in named], fragments)
        check_within(within)
    except Exception as exception:  # whatever it is, this rank must not miss the comparison below
        error, named = exception, []
    identity, named = agree_at_construction("LocalSGD", error, named, options, process_set)
    own_parameters = {id(parameter) for _, parameter in named}
    pairs = [*named, *(pair for pair in pairs or () if id(pair[1]) not in own_parameters)]
    if not member:
        return _local(DistributedOptimizer(optimizer, pairs, process_set=process_set), process_set)

    groups = rank_groups(within, process_set, f"hvd_ckpt.local.{identity}.hosts")
    own = next(group for group in groups if mpi_ops.rank() in group)
    start_alike(named, model, process_set, f"hvd_ckpt.local.{identity}.start")
    sets, added = process_sets_of(groups, process_set)
    positions = {rank: position for position, rank in enumerate(ranks_of(process_set))}
    folder = None if offload_folder is None else Path(offload_folder)
    try:
        split: dict[str, Any] = {}
        if stage and len(own) > 1:
            split = {"shard": stage, "offload": offload, "offload_folder": folder}
        distributed = DistributedOptimizer(
            optimizer, pairs, process_set=sets[tuple(own)], model=model, **split
        )
        new = _local(distributed, process_set)
        new._added_sets = added
        new._averaging = Averaging(
            new,
            model,
            process_set,
            [[positions[rank] for rank in group] for group in groups],
            f"hvd_ckpt.local.{identity}",
            schedule,
            moments,
            outer,
            format,
            (lambda device: Offload(folder, device, parameters=True)) if offload else None,
        )
    except Exception:  # raised on all ranks
        release(added)
        raise
    new.register_step_post_hook(note_work)
    return new


def _check(optimizer: object, outer: Outer | None, within: object, process_set: Any, elastic: bool) -> None:
    """Raises ValueError or TypeError for the first argument that is wrong on this rank."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, ReducedOptimizer):
        raise ValueError(
            "optimizer is a DistributedOptimizer already; give LocalSGD the bare torch.optim optimizer, and within= the ranks "
            "whose gradients are to be reduced in every step"
        )
    if current().tensor > 1:
        raise ValueError(
            f"LocalSGD cannot be used with tensor={current().tensor}, which splits layers; use DistributedOptimizer, or "
            f"init(tensor=1)"
        )
    if is_elastic() and not elastic:
        raise ValueError(
            "LocalSGD in an elastic job: each rank has weights of its own between averages; commit when optimizer.settled, make "
            "the optimizer anew after each change of ranks, and give elastic=True"
        )
    if is_elastic() and within is not None:
        raise ValueError(f"within={within!r}: ranks of an elastic job come and go, leave it out")
    if within is not None and process_set != global_process_set:
        raise ValueError("within works on all ranks only, not on a process set")
    if outer is not None:
        made = outer([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))]) if callable(outer) else None
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"outer must make a torch.optim.Optimizer from a list of parameters, such as hc.Nesterov(), not {outer!r}"
            )
        check_elementwise(made, promised=True)


def _local(distributed: ReducedOptimizer, process_set: Any) -> LocalOptimizer:
    """The same object, of a class that averages, too."""
    kind = type(distributed)
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    new: Any = distributed
    new.__class__ = type(kind.__name__, (LocalOptimizer, kind), members)
    new._averaging, new._members, new._added_sets = None, process_set, []
    return cast(LocalOptimizer, new)
