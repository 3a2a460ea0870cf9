"""A contender under training. Every peer is wrapped as its own documentation tells; see :mod:`.peers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.bench.shard.contenders import Contender
from hvd_ckpt.bench.shard.model import LEARNING_RATE, blocks, loss
from hvd_ckpt.models.chain import Chain

__all__ = ["Ours", "Session", "Tensors", "state_tensors", "tensors_of"]


class Tensors(NamedTuple):
    """What is held for training, by kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: list[Tensor]


class Session(ABC):
    """One contender's model and optimizer, wrapped. Adam, float32.

    Args:
        model: at its start; it is the session's from here on.
        contender: how to wrap it.
        passes: micro-batches of a step.
        bucket_mb: largest bucket of gradients, in MiB.
        folder: free to use, the same on all ranks.
    """

    model: nn.Module

    def __init__(
        self, model: Chain, contender: Contender, passes: int, bucket_mb: float, folder: Path
    ) -> None:
        self.passes = passes

    @abstractmethod
    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Forward and backward passes of a step's samples, up to where the gradients are ready; the mean loss."""

    @abstractmethod
    def update(self) -> None:
        """The optimizer's step, and what comes after it."""

    def step(self, samples: Sequence[Tensor]) -> float:
        """A whole step; the mean loss."""
        mean = self.accumulate(samples)
        self.update()
        return mean

    @abstractmethod
    def tensors(self) -> Tensors:
        """What is held between :meth:`accumulate` and :meth:`update`."""

    def sent(self) -> int | None:
        """Bytes that its own count says it has sent since the start; None if it has no count."""
        return None

    def backward(self, sample: Tensor) -> float:
        """Forward and backward pass of one sample; its part of the mean loss."""
        part = loss(self.model, sample) / self.passes
        part.backward()  # type: ignore[no-untyped-call]
        return part.item()


class Ours(Session):
    """This library."""

    def __init__(
        self,
        model: Chain,
        contender: Contender,
        passes: int,
        bucket_mb: float,
        folder: Path,
        wire: str = "fp32",
    ) -> None:
        super().__init__(model, contender, passes, bucket_mb, folder)
        model.checkpoint_interval = int(contender.recompute)
        self.model = model
        self.stage = contender.stage
        self._reduced = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        self._steps = 0
        sharded: dict[str, Any] = {"shard": self.stage, "wire": wire} if self.stage else {}
        if self.stage == 3:
            sharded.update(model=model, units=blocks(model))
        if contender.offload:
            folder.mkdir(parents=True, exist_ok=True)
            sharded.update(offload="optimizer", offload_folder=folder)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        self.optimizer: Any = hc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), bucket_cap_mb=bucket_mb, **sharded
        )
        if not self.stage:
            hc.broadcast_parameters(model.state_dict(), root_rank=0)

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        self.optimizer.zero_grad()
        mean = sum(self.backward(sample) for sample in samples)
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
