"""``LocalSGD``: its arguments, checked and described before the ranks compare them, groups of ranks, then the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.agreement import described
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.collectives.process_sets import check_within, process_sets_of, rank_groups, release
from hvd_ckpt.distributed.optimizer import DistributedOptimizer
from hvd_ckpt.distributed.options import check_optimizer, model_of
from hvd_ckpt.distributed.shard import Shard, takes_shard
from hvd_ckpt.parallel.local_sgd.averaging import Averaging
from hvd_ckpt.parallel.local_sgd.optimizer import LocalOptimizer, add_averages
from hvd_ckpt.parallel.local_sgd.schedule import Schedule, assign_fragments
from hvd_ckpt.parallel.local_sgd.weights import Outer
from hvd_ckpt.processes.grid import features_of_job
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.construction import agree_at_construction, name_parameters
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.construction import check_stage, start_alike
from hvd_ckpt.utils.elementwise import check_elementwise
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.unmaterialized import check_shapes


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


@dataclass(frozen=True)
class LocalOptions:
    """The arguments of :func:`hvd_ckpt.LocalSGD`, which has their meaning."""

    optimizer: torch.optim.Optimizer
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    every: int
    outer: Outer | None
    moments: str
    fragments: int
    delay: int
    wire: str
    within: str | Sequence[Sequence[int]] | None
    shard: Shard
    model: torch.nn.Module | None
    process_set: Any
    elastic: bool

    def resolved(self) -> LocalOptions:
        """The options with the parameters as a list, and the model that they come from."""
        model = model_of(self.named_parameters) if self.model is None else self.model
        pairs = None if self.named_parameters is None else list(self.named_parameters)
        return replace(self, model=model, named_parameters=pairs)

    def described(self) -> dict[str, Any]:
        """The options that must be equal on all ranks, as plain data."""
        options = {**vars(self), "shard": self.shard.name, "offload": self.shard.offload}
        if isinstance(self.outer, Nesterov):
            options["outer"] = repr(self.outer)
        own = ("named_parameters", "process_set", "elastic")
        return described(**{name: value for name, value in options.items() if name not in own})

    def check(self) -> None:
        """Raises ValueError or TypeError for the first argument that is wrong on this rank."""
        check_optimizer(self.optimizer)
        if isinstance(self.optimizer, ReducedOptimizer):
            raise ValueError(
                "optimizer is a DistributedOptimizer already; give LocalSGD the bare torch.optim optimizer, and within= the ranks "
                "whose gradients are to be reduced in every step"
            )
        given = {
            **features_of_job(),
            "LocalSGD in an elastic job": is_elastic(),
            "elastic": self.elastic,
            "local": self.every,
            "within": self.within,
            "process_set": self.process_set != global_process_set,
            "wire": None if self.wire == "fp32" else self.wire,
        }
        check(given, {"local": "LocalSGD"})
        if self.outer is not None:
            scalar = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
            made = self.outer([scalar]) if callable(self.outer) else None
            if not isinstance(made, torch.optim.Optimizer):
                raise ValueError(
                    f"outer must make a torch.optim.Optimizer from a list of parameters, such as hc.Nesterov(), not {self.outer!r}"
                )
            check_elementwise(made, promised=True)
        Schedule(self.every, self.fragments, self.delay)
        if self.moments not in ("local", "average"):
            raise ValueError(
                f"moments must be 'local' (each rank keeps its own) or 'average' (in each average), not {self.moments!r}"
            )
        if others := self.shard.given.keys() - {"offload", "offload_folder"}:
            raise ValueError(
                f"shard of LocalSGD has offload and offload_folder alone; leave {min(others)} out"
            )
        check_stage(self.shard.states, self.shard.offload, "fp32")
        check_within(self.within)


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
        check_shapes(named)
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
        new.averaging, new.added_sets = Averaging(new, options, places, prefix), added
        return new
    except Exception:  # raised on all ranks
        release(added)
        raise
