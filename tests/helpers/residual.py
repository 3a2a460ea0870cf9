"""A block of small models, and a model that is a list of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """A transformer's feed-forward block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Listed(nn.Module):
    """Blocks in a list, which the forward pass walks in its own order; they join in no segment."""

    def __init__(self, *blocks: nn.Module, order: Sequence[int] | None = None, **options: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.order, self.options = order or range(len(blocks)), options

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x, **self.options)
        return x
