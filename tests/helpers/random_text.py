"""Steps of the catalogue's language models on random tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.app.datasets.text import TEXTS
from hvd_ckpt.app.models import catalog
from hvd_ckpt.data.objectives import OBJECTIVES


class RandomStep(NamedTuple):
    """A model, its arguments, and its loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


class RandomTokens:
    """Random text, with the attributes of ``Tokens`` that samples need."""

    def __init__(self, vocabulary: int, count: int) -> None:
        self.array = torch.randint(vocabulary, (count,)).numpy()
        self.ordinary, self.mask, self.boundary = vocabulary, vocabulary - 1, None

    def __len__(self) -> int:
        return len(self.array)


def random_step(
    name: str, batch: int, length: int, vocabulary: int, options: Mapping[str, Any] | None = None
) -> RandomStep:
    """The same step in each call."""
    torch.manual_seed(0)
    entry = catalog.find(name)
    model = entry.build({"vocabulary": vocabulary, "length": length}, options)
    # One token more than the samples take, since the targets of causal models lie one token ahead.
    samples = TEXTS[entry.kind](RandomTokens(vocabulary, max(batch, 2) * length + 1), length)
    drawn, objective = samples.batch(range(batch), [0] * batch), OBJECTIVES[entry.kind]()
    return RandomStep(model, drawn.inputs, drawn.shared, lambda output: objective.loss(output, drawn))
