"""What a ``DistributedOptimizer`` splits over the ranks, and how: its argument ``shard``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from hvd_ckpt.utils.text import stage_name

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Shard:
    """The states that are split over the ranks (ZeRO, Rajbhandari et al. 2020), and how. Without options, ``shard="gradients"`` is
    ``shard=hc.Shard("gradients")``.

    Args:
        states: ``"none"``, ``"optimizer"`` (its state), ``"gradients"`` (also gradients), ``"parameters"`` (also parameters); or
            the stage, 0 to 3.
        units: modules of the model, or lists of them, whose parameters are gathered together. By default, they are the recomputed
            segments, else the blocks of the model. All other parameters form another unit.
        offload: ``"optimizer"`` keeps the optimizer's state in pinned host memory for a GPU, or, together with master weights, in
            memory-mapped files for a CPU. ``"parameters"``, if these are split, also keeps the shards of parameters and gradients
            there, so memory holds only the units in use. :func:`hvd_ckpt.init_on_disk` makes a model that is larger than memory.
        offload_folder: folder of these files; by default the temporary folder.
        wire: communication format of shards: ``"fp32"`` (unchanged), ``"fp16"``, ``"bf16"``, ``"int8"``, ``"int4"`` (gradients in
            4 bits, parameters in 8); or ``{"gradients": ..., "parameters": ...}`` with one format for each.
        master_weights: whether to keep float32 copies of half-precision parameters in the shards, and to update these copies. By
            default, they are kept if there are such parameters.
        elementwise: declares that an optimizer of your own updates each element from its value, gradient and state alone, so that
            it can update shards.
        within: if parameters are split, groups of ranks that keep a second copy of them, split over the group: ``"host"``, or
            lists of ranks of equal size. After a step, each parameter is gathered once from all ranks. In the backward pass and
            further passes, it is gathered within the group (hpZ of ZeRO++).

    They are checked by the optimizer, which raises an error on every rank.
    """

    states: str | int
    _: KW_ONLY
    units: Sequence[torch.nn.Module | Sequence[torch.nn.Module]] | None = None
    offload: str | None = None
    offload_folder: str | Path | None = None
    wire: str | Mapping[str, str] = "fp32"
    master_weights: bool | None = None
    elementwise: bool = False
    within: str | Sequence[Sequence[int]] | None = None

    @classmethod
    def of(cls, given: Shard | str | int) -> Shard:
        """What was given as ``shard``."""
        return given if isinstance(given, Shard) else cls(given)

    @property
    def name(self) -> object:
        """The name of the states, or what was given where that is wrong."""
        return stage_name(self.states)

    @property
    def given(self) -> dict[str, object]:
        """The options that differ from their defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self)[1:])
        return {field.name: value for field, value in values if value != field.default}


def takes_shard(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses options of :class:`Shard` as arguments of their own, with an error that says where to give them."""
    own = inspect.signature(function).parameters
    moved = {field.name for field in fields(Shard)} - {"states", *own}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in moved:
                raise TypeError(
                    f"{function.__name__}() has no argument '{name}': give shard=hc.Shard(..., {name}=...)"
                )
        return function(*args, **kwargs)

    return call
