"""Checks before the construction of a distributed optimizer: named parameters that are the same on every rank; elastic jobs.

A check raises its error on one rank; the caller hands it to :func:`agree_at_construction`, which raises it everywhere.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_ckpt.collectives.agreement import (
    Failure,
    ParameterFacts,
    allgather_objects,
    check_described,
    check_parameters,
    digest,
    raise_first_failure,
)
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.processes.devices import check_devices
from hvd_ckpt.processes.grid import require_initialized
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.utils.unmaterialized import is_split

_constructed = itertools.count(1)


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Any
) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """The optimizer's parameters with their names, in the order of the names; and a weak dictionary of all names by parameter.

    The order within a parameter group may differ between ranks (groups that are made from sets).
    """
    if named_parameters is None:
        pairs = [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    else:
        pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known_names: Any = WeakTensorKeyDictionary()
    for name, parameter in pairs:
        # A tied parameter keeps the first of its names, as in model.named_parameters().
        if parameter not in known_names:
            known_names[parameter] = name
    own = set()
    unnamed = []
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            own.add(id(parameter))
            if parameter not in known_names:
                unnamed.append(f"parameter {j} of group {i} (shape {tuple(parameter.shape)})")
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {', '.join(unnamed)}"
        )
    named = [(name, parameter) for parameter, name in known_names.items() if id(parameter) in own]
    check_devices(named)
    for name, parameter in named:
        grad_dtype = getattr(parameter, "grad_dtype", None)
        if grad_dtype is not None and grad_dtype is not parameter.dtype:
            raise ValueError(
                f"parameter '{name}' of {parameter.dtype} asks for gradients of {grad_dtype}, which cannot lie in a bucket "
                f"of its own dtype; leave grad_dtype alone"
            )
    return named, known_names


def warn_of_unsynchronized(model: torch.nn.Module) -> None:
    """Warns of a torch ``SyncBatchNorm``, which is plain batch norm as long as ``torch.distributed`` does not run."""
    if mpi_ops.size() == 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names:
        warnings.warn(
            f"module '{names[0]}' is a torch.nn.SyncBatchNorm ({len(names)} in all), which does not synchronize over Horovod's "
            f"ranks: call hc.SyncBatchNorm.convert(model), or use torch.nn.BatchNorm",
            stacklevel=3,
        )


def check_not_split(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for the first parameter that is split over the ranks already."""
    for name, parameter in named:
        if is_split(parameter):
            raise ValueError(
                f"parameter '{name}' is split over the ranks by another DistributedOptimizer already; call optimizer.unshard() on "
                "that one first, on all ranks; if it is gone, build the model again and load its weights"
            )


def agree_at_construction(
    call: str,
    error: Exception | None,
    named: Sequence[tuple[str, torch.Tensor]],
    options: Mapping[str, Any],
    process_set: Any,
    derived: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, list[tuple[str, torch.Tensor]]]:
    """Compares options, errors and parameters of all ranks, before anything else happens. Collective over all ranks.

    In an elastic job ranks do not construct at the same time, except for optimizers with logical replicas and of local SGD. A new
    worker does while the others wait for it in ``state.sync()``. There the comparison is left to Horovod's own checks.

    Args:
        call: whose options they are.
        error: what is wrong with the arguments on this rank.
        options: as they were given, described; must be equal on all ranks of the process set.
        derived: what follows from them, if nothing is wrong; must be equal, too.

    Returns:
        An identity that all ranks give this optimizer, and the parameters in the order of the first rank of the set.
    """
    require_initialized(call)
    number = next(_constructed)
    alone = is_elastic() and options.get("replicas") is None and options.get("every") is None
    if mpi_ops.size() == 1 or alone:
        if error is not None:
            raise error
        return number, list(named)
    table = [ParameterFacts.of(name, parameter) for name, parameter in named]
    members = sorted(ranks_of(process_set))
    failure = None if error is None else Failure.of(error)
    gathered = allgather_objects(
        (members, failure, number, digest(table), dict(options), dict(derived)),
        mpi_ops.global_process_set,
        call,
    )
    sets, failures, numbers, digests, given, following = zip(*gathered)
    # From here on every rank looks at the same table, also at groups that it is not in: all raise, or none does.
    own = [rank for rank in members if sets[rank] == members]
    if any(sets[other] != others for rank, others in enumerate(sets) if rank in others for other in others):
        check_described({rank: {"process_set": others} for rank, others in enumerate(sets)}, call)
    groups = [others for rank, others in enumerate(sets) if rank == others[0]]
    for group in groups:
        check_described({rank: given[rank] for rank in group}, call, failures)
    raise_first_failure(error, failures)
    for group in groups:
        check_described({rank: following[rank] for rank in group}, call)
    if any(len({digests[rank] for rank in group}) > 1 for group in groups):
        tables = allgather_objects(table, mpi_ops.global_process_set, f"{call}: parameters")
        for group in groups:
            check_parameters([tables[rank] for rank in group], group, in_order=False)
        if mpi_ops.rank() in own:
            places = {facts.name: place for place, facts in enumerate(tables[own[0]])}
            named = sorted(named, key=lambda pair: places[pair[0]])
    # Ranks may have made different numbers of optimizers (one of an elastic job is new). The greatest number grows in each
    # construction, so no two optimizers share it.
    return max(numbers), list(named)


# Horovod Elastic around this library's optimizer.
#
# ``horovod.torch.elastic.TorchState`` keeps a registry of what it knows how to save and send. The handler below adds the
# optimizer, so that a sync sends its state untouched and makes all ranks, old and new, learn order and counts anew.


class ReducedOptimizerStateHandler(OptimizerStateHandler):  # type: ignore[misc]
    """Saves, restores and synchronizes a ``DistributedOptimizer`` for ``TorchState``."""

    value: ReducedOptimizer

    def __init__(self, optimizer: ReducedOptimizer) -> None:
        from hvd_ckpt.utils.rules import ELASTIC, check

        check({ELASTIC: True, "an optimizer of LocalSGD in TorchState": not optimizer.outlasts_ranks})
        super().__init__(optimizer)

    def restore(self) -> None:
        self.value.reset_reduction()
        super().restore()

    def sync(self) -> None:
        from hvd_ckpt.reduction.broadcast import broadcast_optimizer_state

        self.value.reset_reduction()
        broadcast_optimizer_state(self.value, root_rank=0)


set_handler_registry([(ReducedOptimizer, ReducedOptimizerStateHandler), *get_handler_registry()])
