"""Configurations under training: this library's, and what all have in common. For peers see :mod:`hvd_ckpt.bench.shard.peers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.bench.shard.configurations import Configuration
from hvd_ckpt.bench.shard.training import LEARNING_RATE, Training, blocks, loss
from hvd_ckpt.models.chain import Chain

__all__ = ["Ours", "Session", "Tensors", "state_tensors", "tensors_of"]


class Tensors(NamedTuple):
    """The tensors that are held for training, by kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: list[Tensor]


class Session(ABC):
    """One configuration's model and optimizer, wrapped. Adam, float32.

    Args:
        model: at its start; the session changes it.
        configuration: how to wrap it.
        training: sizes of steps and buckets.
        folder: free to use, the same on all ranks.
    """

    model: nn.Module
    optimizer: Any

    def __init__(self, model: Chain, configuration: Configuration, training: Training, folder: Path) -> None:
        self.model, self.configuration, self.training, self.folder = model, configuration, training, folder
        self.wrap(model)

    @abstractmethod
    def wrap(self, model: Chain) -> None:
        """Make the optimizer, and wrap the model as the engine's documentation says."""

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Forward and backward passes of a step's samples, until the gradients are ready; the mean loss."""
        self.optimizer.zero_grad()
        return sum(self.backward(sample) for sample in samples)

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def step(self, samples: Sequence[Tensor]) -> float:
        """A whole step; the mean loss."""
        mean = self.accumulate(samples)
        self.update()
        return mean

    def tensors(self) -> Tensors:
        """The tensors that are held between :meth:`accumulate` and :meth:`update`."""
        return tensors_of(self.model.parameters(), self.optimizer)

    def sent(self) -> int | None:
        """Bytes sent since the start by the engine's own count; None if it has no count."""
        return None

    def backward(self, sample: Tensor) -> float:
        """Forward and backward pass of one sample; its part of the mean loss."""
        part = loss(self.model, sample) / self.training.passes
        part.backward()  # type: ignore[no-untyped-call]
        return part.item()


class Ours(Session):
    """This library.

    Args:
        wire: the wire format, besides the arguments of :class:`Session`.
    """

    def __init__(
        self, model: Chain, configuration: Configuration, training: Training, folder: Path, wire: str = "fp32"
    ) -> None:
        self.wire, self._steps = wire, 0
        super().__init__(model, configuration, training, folder)

    def wrap(self, model: Chain) -> None:
        model.checkpoint_interval = int(self.configuration.recompute)
        self.stage = self.configuration.stage
        self._reduced = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        sharded: dict[str, Any] = {"shard": self.stage, "wire": self.wire} if self.stage else {}
        if self.stage == 3:
            sharded.update(model=model, units=blocks(model))
        if self.configuration.offload:
            self.folder.mkdir(parents=True, exist_ok=True)
            sharded.update(offload="optimizer", offload_folder=self.folder)
        self.optimizer = hc.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
            named_parameters=model.named_parameters(),
            bucket_cap_mb=self.training.bucket_mb,
            **sharded,
        )
        if not self.stage:
            hc.broadcast_parameters(model.state_dict(), root_rank=0)

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        mean = super().accumulate(samples)
        self.optimizer.synchronize()
        self._steps += 1
        return mean

    def update(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def tensors(self) -> Tensors:
        pieces = [piece.parameter for piece in self.optimizer.pieces] if self.stage else []
        held = tensors_of([*self.model.parameters(), *pieces], self.optimizer)
        if self.stage > 1:  # a parameter's gradient has left; what an optimizer steps has it
            return held
        return Tensors(held.parameters, _gradients(self.model.parameters()), held.state)

    def sent(self) -> int:
        ranks = hc.size()
        whole = self._steps * round(2 * (ranks - 1) / ranks * self._reduced) if self.stage < 2 else 0
        return whole + (sum(self.optimizer.traffic.sent.values()) if self.stage else 0)


def tensors_of(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters, their gradients and the optimizer's state; of what is distributed, this rank's part."""
    parameters = list(parameters)
    return Tensors(
        [local(parameter) for parameter in parameters],
        _gradients(parameters),
        list(state_tensors(optimizer)),
    )


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors of an optimizer's state but step counts."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                yield local(value)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    part = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(part, Tensor)
    return part


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
