"""Containers in which blocks hand activations on, and which they change in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Features:
    """An activation, those that skip a block, and a number."""

    x: Tensor
    skip: list[Tensor]
    count: int = 0


class Carried(nn.Module):
    """A block that takes and returns a container: it adds what skipped it, lets its input skip the next, and counts."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, features: Any) -> Any:
        x, skip, count = _read(features)
        result = self.part(x) * (1 + 0.01 * count) + 0.1 * skip[-1]
        if count % 2:
            skip.append(x)
        else:
            skip[-1] = x
        if isinstance(features, dict):
            features.update(x=result, count=count + 1)
        elif isinstance(features, list):
            features[0], features[2] = result, count + 1
        else:
            features.x, features.count = result, count + 1
        return features


def pack(carrier: str, x: Tensor) -> Any:
    """A container of a kind with ``x``, or ``x`` itself."""
    if carrier == "dict":
        return {"x": x, "skip": [x * 0.5], "count": 0}
    if carrier == "list":
        return [x, [x * 0.5], 0]
    return Features(x, [x * 0.5]) if carrier == "dataclass" else x


def unpack(features: Any) -> Tensor:
    """What blocks have made of it."""
    if isinstance(features, Tensor):
        return features
    x, skip, count = _read(features)
    return x + 0.1 * skip[0] + 0.01 * count


def _read(features: Any) -> tuple[Tensor, list[Tensor], int]:
    if isinstance(features, dict):
        return features["x"], features["skip"], features["count"]
    if isinstance(features, list):
        return features[0], features[1], features[2]
    return features.x, features.skip, features.count
