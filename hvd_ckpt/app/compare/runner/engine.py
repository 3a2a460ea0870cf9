"""The interface of an engine: how a rank joins the others, how it wraps model and optimizer, and how it recomputes activations."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hvd_ckpt.app.compare.runner.jobs import join_torch
from hvd_ckpt.processes.launchers import launched_rank, launched_size

Functions = Sequence[Callable[..., Any]]


class Held(NamedTuple):
    """The tensors that are held for training, by kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: list[Tensor]


class Engine(ABC):
    """One way to train on several ranks.

    Args:
        **options: of the project's own wrapper, beside those that the engine always gives it.

    Attributes:
        uses_horovod: it joins the other ranks through Horovod, which over MPI a process can do once in its life.
        wraps_after_apex: ``apex.amp.initialize`` comes before :meth:`wrap`, not after it.
        reduces_by: the project whose calls reduce its gradients, one tensor or bucket at a time: ``horovod``, ``ddp`` or ``apex``;
            empty where no gradient is reduced as a whole.
        checkpoint, grad_scaler: PyTorch's own unless the engine brings another.
        device: of this process; set before :meth:`start`.
        workload: what is trained; set by the benchmarks before :meth:`wrap`, as is ``example``, inputs and targets of the first
            batch.
        rank: number of this process, from 0; set by :meth:`start`.
        size: number of processes; set by :meth:`start`.
    """

    uses_horovod: ClassVar[bool] = False
    wraps_after_apex: ClassVar[bool] = True
    reduces_by: ClassVar[str] = ""
    defaults: ClassVar[dict[str, Any]] = {}
    workload: Any = None
    example: tuple[Tensor, Tensor]
    checkpoint: Callable[..., Any] = staticmethod(checkpoint)
    grad_scaler: Callable[..., Any] = staticmethod(torch.amp.GradScaler)
    device = torch.device("cpu")
    rank: int
    size: int

    def __init__(self, **options: Any) -> None:
        self.options = {**self.defaults, **options}

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it cannot run here, in a clause; None where it can."""
        return None

    def start(self, folder: Path) -> None:
        """Join the other ranks. ``folder`` is the same on all ranks, and free to use."""
        self.rank, self.size = launched_rank() or 0, launched_size()

    def building(self) -> AbstractContextManager[Any]:
        """The context in which a benchmark builds the model."""
        return nullcontext()

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        """Make every rank's weights rank 0's, and training reduce gradients; returns what to train with.

        ``passes`` is the most backward passes before an update.
        """

    def checkpoint_sequential(
        self, functions: Functions, segments: int, *inputs: Any, use_reentrant: bool, **shared: Any
    ) -> Any:
        """Apply ``functions`` in turn, recomputed by segment: PyTorch's own unless the engine brings another.

        PyTorch's takes one input and no keyword arguments; those that every function shares are bound beforehand.
        """
        bound = (
            [functools.partial(function, **shared) for function in functions] if shared else list(functions)
        )
        return checkpoint_sequential(bound, segments, *inputs, use_reentrant=use_reentrant)  # type: ignore[misc]

    def prepare(self, model: nn.Module) -> None:  # noqa: B027  # most engines have nothing to do
        """Called before each step of a benchmark, outside of the time that is measured."""

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        """The forward and backward passes of a step's micro-batches, until the gradients are ready; returns the mean loss.

        Args:
            model, optimizer: as :meth:`wrap` returned them.
            losses: for each micro-batch, a function that runs the forward pass and returns the loss.
        """
        optimizer.zero_grad()
        return sum(run_backward(loss, len(losses)) for loss in losses)

    def update(self, model: nn.Module, optimizer: Any) -> None:
        """The update after :meth:`accumulate`, or after backward passes within Apex's ``scale_loss``."""
        optimizer.step()

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        """The tensors that are held between :meth:`accumulate` and :meth:`update`; of what is distributed, this rank's part."""
        return held_by(model.parameters(), optimizer)

    def scaled_step(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """The update after a backward pass of a scaled loss."""
        scaler.step(optimizer)

    def after_apex_backward(self, optimizer: Any) -> None:  # noqa: B027  # most engines have nothing to do
        """Called at the end of Apex's ``scale_loss``."""

    def uneven(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The context of a loop whose number of steps differs between ranks; afterwards their weights are equal."""
        return nullcontext()

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of all ranks' tensors; every rank calls it."""
        return tensor

    def stop(self) -> None:  # noqa: B027  # most engines have nothing to do
        """Leave the other ranks."""


class OnTorch(Engine):
    """An engine on ``torch.distributed``, over Gloo, and on GPUs over NCCL."""

    def start(self, folder: Path) -> None:
        super().start(folder)
        if not torch.distributed.is_initialized():
            join_torch(folder, self.device)

    def mean(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total / self.size

    def stop(self) -> None:
        torch.distributed.destroy_process_group()


def run_backward(loss: Callable[[], Tensor], passes: int) -> float:
    """The forward and backward pass of a micro-batch; its part of the mean loss."""
    part = loss() / passes
    part.backward()
    return part.item()


def held_by(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> Held:
    """The parameters, their gradients and the optimizer's state without step counts; of what is distributed, this rank's part."""
    parameters = list(parameters)
    # A count of steps is a tensor without dimensions, or a number.
    values = [value for state in optimizer.state.values() for value in state.values()]
    state = [local_part(value) for value in values if isinstance(value, Tensor) and value.dim()]
    return Held([local_part(parameter) for parameter in parameters], gradients_of(parameters), state)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
