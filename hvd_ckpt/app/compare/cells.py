"""Cells: a workload and a way to recompute; and the models whose forward pass recomputes in that way.

A model is written once. It is a :class:`Chain` of layers, some of which may be a :class:`Region`; the cell says in which way and in
how many segments they are recomputed, and the engine brings the functions that do it. Where the cell leaves it to a plan, a model
recomputes nothing until the plan is applied (see :mod:`.worker`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hvd_ckpt.recompute.function import CheckpointFunction
from hvd_ckpt.recompute.sequential import split

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.runner.engine import Engine

PLAN = "plan "  # and a budget: the name of a variant

Function = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    """Settings that all training runs of a comparison share.

    Attributes:
        steps: steps of each training run.
        seed: of weights, batches and random states.
        scale: of the workloads, such as ``default``.
        text: a text file, or None for the standard library's source.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``apex-O1``.
        device: ``cpu`` or ``cuda``.
    """

    steps: int
    seed: int
    scale: str = "default"
    text: str | None = None
    precision: str = "fp32"
    device: str = "cpu"


@dataclass(frozen=True)
class Variant:
    """A way to recompute.

    Attributes:
        segmented: the model's chain is cut into segments, each of which is recomputed.
        use_reentrant: PyTorch's argument of that name.
        explicit: by ``CheckpointFunction``, which gets the parameters as arguments.
        budget: what is recomputed is left to :func:`hvd_ckpt.plan` for this budget, or None.
        schedule: of pipeline stages, or None where the model is whole on each rank.
    """

    segmented: bool = True
    use_reentrant: bool = False
    explicit: bool = False
    budget: str | None = None
    schedule: str | None = None


VARIANTS = {
    "none": Variant(segmented=False),
    "reentrant": Variant(use_reentrant=True),
    "non-reentrant": Variant(),
    "explicit": Variant(explicit=True),
    "gpipe": Variant(segmented=False, schedule="gpipe"),
    "1f1b": Variant(segmented=False, schedule="1f1b"),
}
"""By their names on the command line and in reports; planned ones are called ``plan 0.5x``."""


def find_variant(name: str) -> Variant:
    """The variant of that name: one of :data:`VARIANTS`, or a planned one."""
    if name.startswith(PLAN):
        return Variant(segmented=False, budget=name.removeprefix(PLAN))
    return VARIANTS[name]


@dataclass(frozen=True)
class Cell:
    """One workload, one variant and the number of segments (``chunks``; 0 where nothing is recomputed by segment)."""

    workload: str
    variant: str
    chunks: int

    @property
    def key(self) -> str:
        """A name for events and logs, such as ``bert/reentrant/4``."""
        return f"{self.workload}/{self.variant}/{self.chunks}"


def make_cells(workloads: Mapping[str, Sequence[str]], chunks: Sequence[int]) -> list[Cell]:
    """Each workload with each of its variants, and each of those that have segments with each number of segments."""
    return [
        Cell(workload, variant, count)
        for workload, variants in workloads.items()
        for variant in variants
        for count in (chunks if find_variant(variant).segmented else (0,))
    ]


class Recompute:
    """Recomputes as a cell says, with an engine's functions; without an engine, as the reference, nothing."""

    def __init__(self, cell: Cell | None = None, engine: Engine | None = None) -> None:
        self._variant = find_variant(cell.variant) if cell is not None else VARIANTS["none"]
        self._chunks = cell.chunks if cell is not None else 0
        self._engine = engine if self._variant.segmented else None

    @property
    def schedule(self) -> str | None:
        """The schedule of pipeline stages, if the cell has them."""
        return self._variant.schedule

    def chain(self, functions: Sequence[Function], *inputs: Any, **shared: Any) -> Any:
        """Apply ``functions`` in turn, recomputed by segment; each of them gets ``shared``."""
        if self._engine is None:
            return _apply(functions, *inputs, **shared)
        # A scenario may use fewer layers in a step than a cell has segments.
        segments = min(self._chunks, len(functions))
        if self._variant.explicit:
            left = list(functions)
            for length in split(len(functions), segments):
                part, left = left[:length], left[length:]
                inputs = (_explicitly(functools.partial(_apply, part, **shared), inputs, part),)
            return inputs[0]
        return self._engine.checkpoint_sequential(
            functions, segments, *inputs, use_reentrant=self._variant.use_reentrant, **shared
        )

    def region(self, function: Function, *inputs: Any) -> Any:
        """Apply ``function``, recomputed as a whole."""
        if self._engine is None:
            return function(*inputs)
        if self._variant.explicit:
            return _explicitly(function, inputs, [function])
        return self._engine.checkpoint(function, *inputs, use_reentrant=self._variant.use_reentrant)


KEEP = Recompute()


class Chain(nn.Module):
    """Layers applied in turn, recomputed by segment.

    Args:
        layers: the layers; one that appears several times is shared.
        recompute: the cell's way.
    """

    def __init__(self, layers: Sequence[nn.Module], recompute: Recompute) -> None:
        super().__init__()
        self.chain = nn.ModuleList(layers)
        self._recompute = recompute

    def __len__(self) -> int:
        return len(self.chain)

    def forward(self, *inputs: Any, path: Sequence[int] | None = None, **shared: Any) -> Any:
        """``path`` names the layers to apply, and their order, where that is not simply all of them."""
        layers = list(self.chain) if path is None else [self.chain[index] for index in path]
        return self._recompute.chain(layers, *inputs, **shared)


class Region(nn.Module):
    """A layer that is recomputed by itself, wherever it stands."""

    def __init__(self, layer: nn.Module, recompute: Recompute) -> None:
        super().__init__()
        self.layer = layer
        self._recompute = recompute

    def forward(self, x: Any) -> Any:
        return self._recompute.region(self.layer, x)


def _apply(functions: Sequence[Function], *inputs: Any, **shared: Any) -> Any:
    for function in functions:
        inputs = (function(*inputs, **shared),)
    return inputs[0]


def _explicitly(function: Function, inputs: tuple[Any, ...], layers: Sequence[Function]) -> Any:
    """Apply ``function``, which applies these layers, with their parameters as arguments."""
    modules = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    return CheckpointFunction.apply(function, len(inputs), *inputs, *parameters)
