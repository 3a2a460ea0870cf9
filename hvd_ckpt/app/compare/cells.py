"""Cells: a workload and a way to recompute; and the models whose forward pass recomputes in that way.

A model is written once. It is a :class:`Chain` of layers, some of which may be a :class:`RecomputedLayer`; the cell says in
which way and in how many segments they are recomputed, and the engine brings the functions that do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.runner.engine import Engine

Function = Callable[..., Any]


@dataclass(frozen=True)
class TrainingSettings:
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
    """

    segmented: bool = True
    use_reentrant: bool = False


VARIANTS = {
    "none": Variant(segmented=False),
    "reentrant": Variant(use_reentrant=True),
    "non-reentrant": Variant(),
    "explicit": Variant(),  # by CheckpointFunction, in the one scenario that has it
}


@dataclass(frozen=True)
class Cell:
    """One workload, the name of a variant, and the number of segments (``chunks``; 0 where nothing is recomputed by segment)."""

    workload: str
    variant: str
    chunks: int

    @property
    def key(self) -> str:
        """A name for events and logs, such as ``bert/reentrant/4``."""
        return f"{self.workload}/{self.variant}/{self.chunks}"


def make_cells(workloads: Mapping[str, Sequence[str]], chunks: Sequence[int]) -> tuple[Cell, ...]:
    """Each workload with each of its variants, and each of those that have segments with each number of segments."""
    return tuple(
        Cell(workload, variant, count)
        for workload, variants in workloads.items()
        for variant in variants
        for count in (chunks if VARIANTS[variant].segmented else (0,))
    )


class Recompute:
    """Recomputes as a cell says, with an engine's functions; without them, as the reference, nothing.

    Attributes:
        way: the variant.
        chunks: the number of segments, 0 where nothing is recomputed by segment.
    """

    def __init__(self, cell: Cell | None = None, engine: Engine | None = None) -> None:
        self.way = VARIANTS[cell.variant if cell is not None else "none"]
        self.chunks = cell.chunks if cell is not None else 0
        self._engine = engine if self.way.segmented else None

    def chain(self, functions: Sequence[Function], *inputs: Any, **shared: Any) -> Any:
        """Apply ``functions`` in turn, recomputed by segment; each of them gets ``shared``."""
        if self._engine is not None:
            # A scenario may use fewer layers in a step than a cell has segments.
            segments, how = min(self.chunks, len(functions)), {"use_reentrant": self.way.use_reentrant}
            return self._engine.checkpoint_sequential(functions, segments, *inputs, **how, **shared)
        for function in functions:
            inputs = (function(*inputs, **shared),)
        return inputs[0]

    def region(self, function: Function, *inputs: Any) -> Any:
        """Apply ``function``, recomputed as a whole."""
        if self._engine is None:
            return function(*inputs)
        return self._engine.checkpoint(function, *inputs, use_reentrant=self.way.use_reentrant)


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
        self.recompute = recompute

    def __len__(self) -> int:
        return len(self.chain)

    def forward(self, *inputs: Any, path: Sequence[int] | None = None, **shared: Any) -> Any:
        """``path`` names the layers to apply, and their order, where that is not simply all of them."""
        layers = list(self.chain) if path is None else [self.chain[index] for index in path]
        return self.recompute.chain(layers, *inputs, **shared)


class RecomputedLayer(nn.Module):
    """A layer that is recomputed by itself, wherever it stands."""

    def __init__(self, layer: nn.Module, recompute: Recompute) -> None:
        super().__init__()
        self.layer = layer
        self._recompute = recompute

    def forward(self, x: Any) -> Any:
        return self._recompute.region(self.layer, x)
