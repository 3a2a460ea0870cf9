"""How a model's forward pass recomputes in a cell: the one place where models, engines and variants meet.

A model is written once. It hands its layers to :meth:`Recompute.chain` or a part of itself to :meth:`Recompute.region`;
the cell says in which way and in how many segments, and the engine brings the functions that do it. Where the cell leaves it to a
plan, a model keeps everything until the plan is applied (see :mod:`.worker`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from hvd_ckpt.bench.compare.cells import VARIANTS, Cell, find_variant

__all__ = ["KEEP", "Chain", "Recompute", "Recomputer", "Region"]

Function = Callable[..., Any]


class Recomputer(Protocol):
    """The functions that an engine brings: PyTorch's, or its own."""

    def checkpoint(self, function: Function, *inputs: Any, use_reentrant: bool) -> Any: ...

    def checkpoint_sequential(
        self, functions: Sequence[Function], segments: int, *inputs: Any, use_reentrant: bool, **shared: Any
    ) -> Any: ...


class Recompute:
    """Recomputes as a cell says, with an engine's functions; without an engine, which only the reference does, it keeps."""

    def __init__(self, cell: Cell | None = None, engine: Recomputer | None = None) -> None:
        variant = find_variant(cell.variant) if cell is not None else VARIANTS["none"]
        self._variant = variant
        self._chunks = cell.chunks if cell is not None else 0
        self._engine = engine if variant.segmented else None

    def chain(self, functions: Sequence[Function], *inputs: Any, **shared: Any) -> Any:
        """Apply ``functions`` in turn, recomputed by segment; each of them gets ``shared``."""
        if self._engine is None:
            return _apply(functions, *inputs, **shared)
        segments = min(self._chunks, len(functions))
        if self._variant.explicit:
            for part in _split(functions, segments):
                function = functools.partial(_apply, part, **shared)
                inputs = (_explicitly(function, inputs, _parameters_of(part)),)
            return inputs[0]
        return self._engine.checkpoint_sequential(
            functions, segments, *inputs, use_reentrant=self._variant.use_reentrant, **shared
        )

    def region(self, function: Function, *inputs: Any) -> Any:
        """Apply ``function``, recomputed as a whole."""
        if self._engine is None:
            return function(*inputs)
        if self._variant.explicit:
            return _explicitly(function, inputs, _parameters_of([function]))
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


def _explicitly(function: Function, inputs: tuple[Any, ...], parameters: Sequence[nn.Parameter]) -> Any:
    from hvd_ckpt.recompute.function import CheckpointFunction

    return CheckpointFunction.apply(function, len(inputs), *inputs, *parameters)


def _parameters_of(functions: Sequence[Function]) -> list[nn.Parameter]:
    modules = nn.ModuleList(function for function in functions if isinstance(function, nn.Module))
    return [parameter for parameter in modules.parameters() if parameter.requires_grad]


def _split(functions: Sequence[Function], segments: int) -> Iterator[Sequence[Function]]:
    """Segments of equal length, the last with what is left over."""
    length = len(functions) // segments
    for index in range(segments):
        yield functions[index * length : None if index == segments - 1 else (index + 1) * length]
