"""A block of small models."""

from __future__ import annotations

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
