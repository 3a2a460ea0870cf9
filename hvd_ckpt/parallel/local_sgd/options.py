"""The arguments of ``LocalSGD`` as one object, checked and described before the ranks compare them; and ``Nesterov``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.agreement import described
from hvd_ckpt.collectives.process_sets import check_within
from hvd_ckpt.distributed.options import check_optimizer, model_of
from hvd_ckpt.distributed.shard import Shard
from hvd_ckpt.parallel.local_sgd.schedule import Schedule
from hvd_ckpt.parallel.local_sgd.weights import Outer
from hvd_ckpt.processes.grid import features_of_job
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.construction import check_stage
from hvd_ckpt.utils.elementwise import check_elementwise
from hvd_ckpt.utils.rules import check


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

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.every, self.fragments, self.delay)

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
