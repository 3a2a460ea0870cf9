"""A batch: the input of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples for one call of a model, and what should come out.

    The first dimension of every tensor counts the samples, so a batch can be split.

    Attributes:
        inputs: the model's positional arguments.
        targets: what the loss compares the model's output with.
        shared: keyword arguments that all blocks of the model share, such as masks.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    shared: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.targets)

    def split(self, parts: int) -> list[Batch]:
        """The batch in that many parts, whose lengths differ by one at most; in fewer, if it has fewer samples."""
        parts = max(min(parts, len(self)), 1)
        cut = [tensor.tensor_split(parts) for tensor in (*self.inputs, self.targets, *self.shared.values())]
        return [
            Batch(
                one[: len(self.inputs)],
                one[len(self.inputs)],
                dict(zip(self.shared, one[len(self.inputs) + 1 :])),
            )
            for one in zip(*cut)
        ]

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(
            tuple(tensor.to(device) for tensor in self.inputs),
            self.targets.to(device),
            {name: tensor.to(device) for name, tensor in self.shared.items()},
        )
