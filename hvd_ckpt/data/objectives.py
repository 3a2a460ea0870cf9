"""Batches and training objectives: the loss of a batch, the number of terms that it is a mean of, and metrics.

If a batch is split over micro-batches or ranks, its mean is the weighted mean of the parts, by their numbers of terms. So every
objective computes that number from the batch alone, before the model runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from hvd_ckpt.processes.devices import to_device

IGNORED = -100  # the target of ignored positions, as in torch's cross_entropy


@dataclass(frozen=True)
class Batch:
    """Samples for one call of a model, with their targets.

    The first dimension of each tensor is the number of samples, so a batch can be split.

    Attributes:
        inputs: positional arguments of the model.
        targets: targets that the loss compares with the output of the model.
        shared: keyword arguments that all blocks of the model share, such as masks.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    shared: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.targets)

    def split(self, parts: int) -> list[Batch]:
        """The batch in ``parts`` parts whose lengths differ by at most one; in fewer if it has fewer samples.

        Raises:
            ValueError: its tensors have different numbers of samples.
        """
        # Inputs, targets and shared tensors in one list, so that each part has all of them by the same positions.
        tensors = (*self.inputs, self.targets, *self.shared.values())
        parts = max(min(parts, samples_of(tensors)), 1)
        cut = [tensor.tensor_split(parts) for tensor in tensors]
        return [
            Batch(
                part[: len(self.inputs)],
                part[len(self.inputs)],
                dict(zip(self.shared, part[len(self.inputs) + 1 :])),
            )
            for part in zip(*cut)
        ]

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; the host does not wait for the copy to a GPU."""
        return Batch(
            tuple(to_device(tensor, device) for tensor in self.inputs),
            to_device(self.targets, device),
            {name: to_device(tensor, device) for name, tensor in self.shared.items()},
        )


def samples_of(tensors: Sequence[Tensor]) -> int:
    """The number of samples in each of some tensors; unless it is the same, a ValueError."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape[:1] != shapes[0][:1] or not shape for shape in shapes):
        raise ValueError(
            f"The first dimension of every tensor in the batch must count the same samples, got the shapes "
            f"{', '.join(map(str, shapes))}."
        )
    return int(shapes[0][0])


class Objective(ABC):
    """A loss that is a mean over terms.

    Attributes:
        unit: the unit of throughput.
    """

    unit: str

    def weight(self, batch: Batch) -> float:
        """The number of terms that the loss of ``batch`` is the mean of; by default its samples."""
        return float(len(batch))

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean loss, a tensor with one element; 0 without terms."""

    @abstractmethod
    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Further means over the same terms."""

    def of_loss(self, loss: float) -> dict[str, float]:
        """Further metrics of an evaluation, from its mean loss."""
        return {}

    def units(self, batch: Batch) -> int:
        """The number of :attr:`unit` in a batch."""
        return len(batch)


class NextOrHiddenToken(Objective):
    """Cross entropy of tokens: scores (batch, positions, vocabulary), targets (batch, positions), -100 for ignored positions."""

    unit = "tokens"

    def weight(self, batch: Batch) -> float:
        return float((batch.targets != IGNORED).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        total = functional.cross_entropy(
            output.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / _terms(batch)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        right = (output.argmax(-1) == batch.targets).sum()
        return {"accuracy": right / _terms(batch)}

    def of_loss(self, loss: float) -> dict[str, float]:
        """Perplexity of the next token or of the hidden tokens."""
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan}

    def units(self, batch: Batch) -> int:
        return batch.inputs[0].numel()


def _terms(batch: Batch) -> Tensor:
    """The number of terms of a mean over tokens, at least 1, on the device of the targets."""
    return (batch.targets != IGNORED).sum().clamp(min=1)


class Classification(Objective):
    """Cross entropy of classes: scores (batch, classes), targets (batch,)."""

    unit = "images"

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(output, batch.targets)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == batch.targets).double().mean()}


class Segmentation(Objective):
    """One minus the Dice coefficient of each volume, averaged over all classes except the background.

    Scores are (batch, classes, depth, height, width), targets (batch, depth, height, width). The coefficient is that of Milletari
    et al., "V-Net", 2016, equation in section 3.
    """

    unit = "volumes"

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        probabilities = output.float().softmax(1)
        return 1 - _dice(probabilities, _one_hot(batch.targets, output.size(1))).mean()

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        classes = output.size(1)
        chosen = _one_hot(output.argmax(1), classes)
        return {"dice": _dice(chosen, _one_hot(batch.targets, classes)).mean()}


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return functional.one_hot(labels, classes).movedim(-1, 1).float()


def _dice(predicted: Tensor, target: Tensor) -> Tensor:
    """The coefficient of each volume and each class except the background, (batch, classes - 1)."""
    predicted, target = predicted[:, 1:].flatten(2), target[:, 1:].flatten(2)
    smallest = torch.finfo(predicted.dtype).tiny  # both empty: 1
    return (2 * (predicted * target).sum(2) + smallest) / (
        predicted.square().sum(2) + target.square().sum(2) + smallest
    )


OBJECTIVES: dict[str, type[Objective]] = {
    "causal": NextOrHiddenToken,
    "masked": NextOrHiddenToken,
    "permutation": NextOrHiddenToken,
    "images": Classification,
    "volumes": Segmentation,
}
"""Objectives by the kind of data set that a model needs."""
