"""Cells: a workload and a way to recompute; and the models whose forward pass recomputes in that way.

A model is written once. It is a :class:`Chain` of layers, some of which may be a :class:`RecomputedLayer`; the cell says in
which way and in how many segments they are recomputed, and the engine brings the functions that do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hvd_ckpt.app.compare.runner.engine import Engine

Function = Callable[..., Any]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that all training runs of a comparison share, as the options of the command."""

    steps: int
    seed: int
    scale: str = "default"  # or "quick"
    text: str | None = None
    precision: str = "fp32"
    device: str = "cpu"


@dataclass(frozen=True)
class Cell:
    """One workload, a variant, and the number of segments (``chunks``; 0 where nothing is recomputed by segment).

    A variant is ``none``, ``reentrant`` or ``non-reentrant``; or in the one scenario that has it ``explicit``: CheckpointFunction.
    """

    workload: str
    variant: str
    chunks: int

    @property
    def key(self) -> str:
        """A name for events and logs, such as ``bert/reentrant/4``."""
        return f"{self.workload}/{self.variant}/{self.chunks}"


class Recompute:
    """Recomputes as a cell says, with an engine's functions; without them, as the reference, nothing.

    Attributes:
        chunks: the number of segments, 0 where nothing is recomputed by segment.
    """

    def __init__(self, cell: Cell | None = None, engine: Engine | None = None) -> None:
        variant = "none" if cell is None else cell.variant
        self.chunks = 0 if cell is None else cell.chunks
        self._how = {"use_reentrant": variant == "reentrant"}
        self._engine = None if variant == "none" else engine

    def chain(self, functions: Sequence[Function], *inputs: Any, **shared: Any) -> Any:
        """Apply ``functions`` in turn, recomputed by segment; each of them gets ``shared``."""
        if self._engine is not None:
            # A scenario may use fewer layers in a step than a cell has segments.
            segments = min(self.chunks, len(functions))
            return self._engine.checkpoint_sequential(functions, segments, *inputs, **self._how, **shared)
        for function in functions:
            inputs = (function(*inputs, **shared),)
        return inputs[0]

    def region(self, function: Function, *inputs: Any) -> Any:
        """Apply ``function``, recomputed as a whole."""
        if self._engine is None:
            return function(*inputs)
        return self._engine.checkpoint(function, *inputs, **self._how)


KEEP = Recompute()


class Chain(nn.Module):
    """Layers applied in turn, recomputed by segment; one that appears several times is shared."""

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
