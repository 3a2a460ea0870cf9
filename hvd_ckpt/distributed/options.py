"""The arguments of a ``DistributedOptimizer`` as one object, checked and described before the ranks compare them.

This file imports only the names of the stages from ``sharding``, so an optimizer without sharding does not load that room.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum, global_process_set

from hvd_ckpt.collectives.agreement import described
from hvd_ckpt.distributed.shard import Shard
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.reduction.communicator import Communicator, Compression
from hvd_ckpt.reduction.optimizer import ReducedOptimizer

if TYPE_CHECKING:
    from hvd_ckpt.reduction.assignment import BucketAssignment

OPERATIONS = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}
_HARMLESS = {"offload_folder", "elementwise"}  # options of shards that mean nothing without shards


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`hvd_ckpt.DistributedOptimizer`, which has their meaning."""

    optimizer: torch.optim.Optimizer
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    compression: Any
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    num_groups: int
    groups: Sequence[Sequence[torch.Tensor]] | int | None
    sparse_as_dense: bool
    process_set: Any
    bucket_cap_mb: float
    keep_buckets: bool
    shard: Shard
    model: torch.nn.Module | None
    replicas: int | None

    def resolved(self) -> Options:
        """The options with ``groups`` in place of ``num_groups``, and the model that ``named_parameters`` comes from.

        To be called before the parameters are read: a generator that has begun does not tell its model.
        """
        groups = self.groups
        if self.num_groups:
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=4
            )
            groups = self.num_groups if groups is None else groups
        model = model_of(self.named_parameters) if self.model is None else self.model
        return dataclasses.replace(self, groups=groups, num_groups=0, model=model)

    @property
    def are_plain(self) -> bool:
        """Whether gradients are allreduced and nothing else: no shards, no logical replicas, and no option of theirs."""
        return self.shard.name == "none" and not {*self.shard.given} - _HARMLESS and self.replicas is None

    @property
    def prescale(self) -> float:
        """Factor of gradients before they are summed."""
        return 1.0 / self.gradient_predivide_factor if self.op == Average else 1.0

    def communicator(self) -> Communicator:
        """The communicator that allreduces buckets."""
        postscale = self.gradient_predivide_factor if self.op == Average else 1.0
        return Communicator(
            self.process_set,
            op=self.op,
            prescale_factor=self.prescale,
            postscale_factor=postscale,
            compression=self.compression,
        )

    def assignment(self, named: Sequence[tuple[str, torch.Tensor]]) -> BucketAssignment:
        """The assignment of parameters to buckets."""
        from hvd_ckpt.reduction.assignment import BucketAssignment

        return BucketAssignment(named, self.bucket_cap_mb * MEBIBYTE, self.groups)

    def described(self, known_names: Any) -> dict[str, Any]:
        """The options that must be equal on all ranks, as plain data, with the names of parameters in place of these."""
        of_rank = {
            "named_parameters",
            "num_groups",
            "groups",
            "process_set",
            "offload_folder",
            "model",
            "states",
        }
        options = {
            field.name: getattr(of, field.name)
            for of in (self, self.shard)
            for field in dataclasses.fields(of)
            if field.name not in of_rank
        }
        op = OPERATIONS.get(self.op, self.op) if isinstance(self.op, Hashable) else self.op
        options.update(op=op, shard=self.shard.name)
        extended = self.replicas is not None or options["shard"] != "none"
        groups = self.groups
        if isinstance(groups, list) and known_names is not None:
            groups = [[known_names.get(parameter, "?") for parameter in group] for group in groups]
        return described(**options, model=self.model if extended else None, groups=groups)

    def features(self) -> dict[str, Any]:
        """What the options give to the rules, without the options of shards that :func:`check_stage` reads."""
        return {
            "op": None if self.op == Average else OPERATIONS.get(self.op, self.op),
            "gradient_predivide_factor": None
            if self.gradient_predivide_factor == 1.0
            else self.gradient_predivide_factor,
            "ROCm": mpi_ops.rocm_built(),
            "compression": self.compression is not Compression.none,
            "groups": self.groups not in (None, 0),
            "process_set": self.process_set != global_process_set,
            "model": self.model is not None,
            "units": self.shard.units is not None,
            "master_weights": self.shard.master_weights,
            "replicas": self.replicas,
            "within": self.shard.within,
        }

    def check(self) -> None:
        """Raises ValueError or TypeError for the first argument of a plain optimizer that is wrong on this rank."""
        if isinstance(self.optimizer, ReducedOptimizer):
            raise ValueError(
                "optimizer is a DistributedOptimizer already; wrap the bare torch.optim optimizer once"
            )
        check_optimizer(self.optimizer)
        self._check_types()
        if self.backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {self.backward_passes_per_step}")
        features = self.features()
        if self.are_plain and any(
            value not in (None, False) for name, value in features.items() if name != "model"
        ):
            from hvd_ckpt.utils.rules import check

            check(features)
        factor = self.gradient_predivide_factor
        if not 0 < factor < math.inf:
            raise ValueError(f"gradient_predivide_factor must be a finite number > 0, not {factor}")
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be > 0 (MiB), not {self.bucket_cap_mb}")
        if self.op == Adasum and mpi_ops.size() > 1:
            from hvd_ckpt.reduction.adasum import adasum_unavailable

            reason = adasum_unavailable()
            if reason is not None:
                raise ValueError(reason)
        _check_groups(self.groups)
        if self.model is not None:
            known = set(map(id, self.model.parameters()))
            own = [one for group in self.optimizer.param_groups for one in group["params"]]
            if own and known.isdisjoint(map(id, own)):
                raise ValueError(
                    "model has none of the parameters of the optimizer: give the module that it trains, and its named_parameters"
                )

    def _check_types(self) -> None:
        switch, number = (True, False, 0, 1), "a number"
        for name, value, is_right, right in (
            ("op", self.op, self.op in [*OPERATIONS], f"hc.{', hc.'.join(OPERATIONS.values())}"),
            (
                "compression",
                self.compression,
                hasattr(self.compression, "compress") and hasattr(self.compression, "decompress"),
                "hc.Compression.none, hc.Compression.fp16 or a class with compress() and decompress()",
            ),
            ("process_set", self.process_set, is_process_set(self.process_set), "an hc.ProcessSet"),
            (
                "backward_passes_per_step",
                self.backward_passes_per_step,
                isinstance(self.backward_passes_per_step, Integral),
                "a whole number",
            ),
            (
                "gradient_predivide_factor",
                self.gradient_predivide_factor,
                isinstance(self.gradient_predivide_factor, Real),
                number,
            ),
            ("bucket_cap_mb", self.bucket_cap_mb, isinstance(self.bucket_cap_mb, Real), number),
            ("sparse_as_dense", self.sparse_as_dense, self.sparse_as_dense in switch, "True or False"),
            ("keep_buckets", self.keep_buckets, self.keep_buckets in switch, "True or False"),
            (
                "master_weights",
                self.shard.master_weights,
                self.shard.master_weights in (None, *switch),
                "True, False or None",
            ),
        ):
            if not is_right:
                raise TypeError(f"{name} must be {right}, not {value!r}")


def is_process_set(value: object) -> bool:
    """Whether it is one of Horovod's process sets, or acts as one."""
    return isinstance(value, ProcessSet) or callable(getattr(value, "included", None))


def check_optimizer(optimizer: object) -> None:
    """Raises TypeError for what is not an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    # A tensor would be taken for its rows, and an iterator could be read only once.
    are_lists = isinstance(groups, list) and all(
        isinstance(group, Iterable) and not isinstance(group, (torch.Tensor, Iterator)) for group in groups
    )
    if isinstance(groups, bool) or not (are_lists or (isinstance(groups, int) and groups >= 0)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[int] = set()
    for parameter in itertools.chain.from_iterable(groups) if isinstance(groups, list) else ():
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def model_of(named_parameters: Any) -> torch.nn.Module | None:
    """The module whose ``named_parameters()`` this is, if that is a generator that has not begun."""
    if not inspect.isgenerator(named_parameters) or named_parameters.__name__ != "named_parameters":
        return None
    owner = inspect.getgeneratorlocals(named_parameters).get("self")
    return owner if isinstance(owner, torch.nn.Module) else None
