"""A plan: what the forward pass of each block keeps, and what comes back by computing it again.

It is plain data: names, numbers and call numbers, made by the planner for one model and one shape of input, good for
a file (:mod:`hvd_ckpt.planning.file`). :meth:`Plan.apply` gives each block its treatment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from hvd_ckpt.names import one_line
from hvd_ckpt.planning.treatment import KEEP, Treatment, expect_autocast, treat, treat_chain, untreat

__all__ = ["BlockPlan", "Cost", "Plan", "PlanError", "applied"]

M = TypeVar("M", bound=nn.Module)

Items = tuple[Any, ...]
"""Numbers of blocks in order; a nested tuple is a segment that is recomputed as a whole, and holds items itself."""


class PlanError(ValueError):
    """A plan does not fit a model, or a plan file cannot be read; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Cost(NamedTuple):
    """What a training step (forward, loss, backward) takes.

    Attributes:
        peak_bytes: the most bytes allocated at a time, above those at its start; parameters' gradients are there before.
        seconds: its duration.
    """

    peak_bytes: int
    seconds: float


_NOTHING = Cost(0, 0.0)


@dataclass(frozen=True)
class BlockPlan:
    """One block of the chain.

    Attributes:
        members: names of its modules as in ``model.named_modules()``; several only if they are called one after the
            other by one ``nn.Sequential``.
        kind: the class of the module (or ``A+B+C``); with ``parameters`` it tells whether a model is the one planned for.
        parameters: shapes of its parameters, in order.
        treatment: what is done with it.
        kept_bytes: bytes held between its forward and its backward pass, its output included.
        added_seconds: time that it takes beyond keeping everything; may be negative.
    """

    members: tuple[str, ...]
    kind: str
    parameters: tuple[tuple[int, ...], ...]
    treatment: Treatment = KEEP
    kept_bytes: int = 0
    added_seconds: float = 0.0

    @property
    def name(self) -> str:
        """``encoder.layer.3``, or ``features.0..4`` for several modules."""
        first, last = self.members[0], self.members[-1]
        return first if first == last else f"{first}..{last.rpartition('.')[2]}"


@dataclass(frozen=True)
class Plan:
    """What :func:`hvd_ckpt.plan` returns.

    Attributes:
        blocks: the chain, in the order in which the forward pass calls it.
        items: the order of work: block numbers, and segments of them that are recomputed as a whole.
        sample: dtype and shape of each tensor that the plan was made with.
        budget: bytes, or None where the fastest plan was asked for.
        autocast: the dtype of the autocast it was made under, such as ``"bfloat16"``, or None; a model that runs otherwise warns.
        predicted: what the step was predicted to cost.
        measured: what it cost when it was measured with this plan, or None.
        keep_everything: the predicted cost of keeping everything.
        smallest: the predicted cost of the plan with the smallest peak.
        frontier: predicted costs of the plans that nothing beats in both, from the smallest peak to the fastest.
        timelines: (seconds, bytes) during one step, under ``"before"`` (everything kept, where that was measured) and ``"after"``.
    """

    blocks: tuple[BlockPlan, ...]
    items: Items
    sample: tuple[tuple[str, tuple[int, ...]], ...] = ()
    budget: int | None = None
    autocast: str | None = None
    predicted: Cost = _NOTHING
    measured: Cost | None = None
    keep_everything: Cost = _NOTHING
    smallest: Cost = _NOTHING
    frontier: tuple[Cost, ...] = ()
    timelines: dict[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)

    def apply(self, model: M) -> M:
        """Gives the blocks of ``model`` their treatments, in place; returns ``model``.

        Modules keep their names, parameters, buffers, hooks and ``state_dict``; only how their ``forward`` is run
        changes. An earlier plan of the model is removed first.

        Raises:
            PlanError: a block is missing in the model or is another one, and says which and why.
        """
        self.check(model)
        remove(model)
        modules = dict(model.named_modules())
        for block in self.blocks:
            if len(block.members) == 1:
                treat(modules[block.members[0]], block.treatment)
        for container, items in self._containers().items():
            treat_chain(modules[container], items)
        for module in modules.values():
            expect_autocast(module, self.autocast)
        return model

    def remove(self, model: M) -> M:
        """Undoes :meth:`apply`; a model without a plan stays as it is. Returns ``model``."""
        remove(model)
        return model

    def check(self, model: nn.Module) -> None:
        """Whether the plan fits the model.

        Raises:
            PlanError: a block is missing in the model or is another one.
        """
        modules = dict(model.named_modules())
        for block in self.blocks:
            missing = [name for name in block.members if name not in modules]
            if missing:
                raise PlanError(
                    f"The plan does not fit this {type(model).__name__}: it has no module '{missing[0]}'. Make a plan for this "
                    "model."
                )
            members = [modules[name] for name in block.members]
            kind = kind_of(members)
            if kind != block.kind:
                raise PlanError(
                    f"The plan does not fit this {type(model).__name__}: block '{block.name}' is of class {kind}, the plan was "
                    f"made for {block.kind}."
                )
            shapes = parameter_shapes(members)
            if shapes != block.parameters:
                at = next(
                    (
                        number
                        for number, pair in enumerate(zip(shapes, block.parameters))
                        if pair[0] != pair[1]
                    ),
                    min(len(shapes), len(block.parameters)),
                )
                have, want = (
                    str(list(one[at])) if at < len(one) else "no such parameter"
                    for one in (shapes, block.parameters)
                )
                raise PlanError(
                    f"The plan does not fit this {type(model).__name__}: parameter {at} of block '{block.name}' has the shape "
                    f"{have}, the plan was made for {want}."
                )
        for container in self._containers():
            if type(modules[container]).forward is not nn.Sequential.forward and not hasattr(
                modules[container], "_hvd_ckpt_items"
            ):
                raise PlanError(
                    f"The plan does not fit this {type(model).__name__}: '{container or 'the model'}' is no plain nn.Sequential, "
                    "whose children the plan runs in segments."
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is there whole or not at all."""
        from hvd_ckpt.planning import file

        file.write(self, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that :meth:`save` wrote. Nothing in the file is executed.

        Raises:
            PlanError: the file is no plan, is damaged, or is of a version this library does not know.
            OSError: it cannot be read.
        """
        from hvd_ckpt.planning import file

        return file.read(Path(path))

    def _containers(self) -> dict[str, list[Any]]:
        """For each ``nn.Sequential`` that must run its children in spans or segments: what it runs, by child names."""
        found: dict[str, list[Any]] = {}
        for item in self.items:
            members = self._members(item)
            if isinstance(item, tuple) or len(self.blocks[item].members) > 1:
                container = members[0].rpartition(".")[0]
                found.setdefault(container, []).append(self._steps(item))
        return found

    def _members(self, item: Any) -> list[str]:
        if isinstance(item, tuple):
            return [name for inner in item for name in self._members(inner)]
        return list(self.blocks[item].members)

    def _steps(self, item: Any) -> Any:
        """An item as ``treat_chain`` takes it: (child names, treatment) or a list of items for a segment."""
        if isinstance(item, tuple):
            return [self._steps(inner) for inner in item]
        block = self.blocks[item]
        names = tuple(name.rpartition(".")[2] for name in block.members)
        return names, (KEEP if len(names) == 1 else block.treatment)


@contextlib.contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """The model runs with the plan."""
    plan.apply(model)
    try:
        yield
    finally:
        plan.remove(model)


def remove(model: nn.Module) -> None:
    """Takes every treatment off a model."""
    for module in model.modules():
        untreat(module)


def kind_of(members: Sequence[nn.Module]) -> str:
    """The classes of some modules: ``BertLayer``, ``Conv2d+BatchNorm2d``."""
    return "+".join(type(member).__name__ for member in members)


def parameter_shapes(members: Sequence[nn.Module]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parameters of some modules, in order."""
    return tuple(tuple(parameter.shape) for member in members for parameter in member.parameters())
