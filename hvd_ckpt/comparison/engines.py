"""The engines: how a rank joins the others, how model and optimizer are wrapped, and how activations are recomputed.

Each is what that project's documentation tells its user to write, and no more. To add one, write a class with these
methods and enter it in :data:`ENGINES`, or name it on the command line as ``module:Class``.
"""

from __future__ import annotations

import functools
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential

__all__ = ["ENGINES", "Engine", "find_engine", "launched_rank_and_size"]

Functions = Sequence[Callable[..., Any]]


class Engine(ABC):
    """One way to train on several ranks.

    Attributes:
        title: the name in tables.
        rank: number of this process, from 0; set by :meth:`start`.
        size: number of processes; set by :meth:`start`.
    """

    title: ClassVar[str]
    rank: int
    size: int

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Join the other ranks. ``folder`` is empty, the same on all ranks, and free to use."""

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Make every rank's weights rank 0's, and training reduce gradients; returns what to train with."""

    def checkpoint_sequential(
        self, functions: Functions, segments: int, *inputs: Any, use_reentrant: bool, **shared: Any
    ) -> Any:
        """Apply ``functions`` in turn, recomputed by segment: PyTorch's own unless the engine brings another.

        PyTorch's takes one input and no keyword arguments; those that every function shares are bound beforehand.
        """
        bound = (
            [functools.partial(function, **shared) for function in functions] if shared else list(functions)
        )
        return checkpoint_sequential(bound, segments, *inputs, use_reentrant=use_reentrant)  # type: ignore[no-untyped-call,misc]

    def stop(self) -> None:  # noqa: B027  # most engines have nothing to do
        """Leave the other ranks."""


class HvdCkpt(Engine):
    """This library."""

    title = "hvd_ckpt"

    def start(self, folder: Path) -> None:
        from hvd_ckpt import runtime

        runtime.init()
        self.rank, self.size = _horovod_rank_and_size()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from hvd_ckpt import reduction

        optimizer = reduction.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        reduction.broadcast_parameters(model.state_dict(), root_rank=0)
        reduction.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def checkpoint_sequential(
        self, functions: Functions, segments: int, *inputs: Any, use_reentrant: bool, **shared: Any
    ) -> Any:
        from hvd_ckpt import recompute

        return recompute.checkpoint_sequential(
            functions, segments, *inputs, use_reentrant=use_reentrant, **shared
        )


class Horovod(Engine):
    """Horovod as it comes, with its own default fusion."""

    title = "Horovod"

    def start(self, folder: Path) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.rank, self.size = _horovod_rank_and_size()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer


class DDP(Engine):
    """PyTorch's DistributedDataParallel over Gloo, each rank with its own batch-norm statistics as in Horovod."""

    title = "PyTorch DDP"

    def start(self, folder: Path) -> None:
        self.rank, self.size = launched_rank_and_size()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=self.rank, world_size=self.size
        )

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False), optimizer

    def stop(self) -> None:
        torch.distributed.destroy_process_group()


ENGINES: dict[str, type[Engine]] = {"hvd_ckpt": HvdCkpt, "horovod": Horovod, "ddp": DDP}


def find_engine(name: str) -> type[Engine]:
    """The engine of that name in :data:`ENGINES`, or the class that ``module:Class`` names.

    Raises:
        ValueError: there is none, or what ``module:Class`` names is no engine.
    """
    if name in ENGINES:
        return ENGINES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"no engine '{name}': choose among {', '.join(ENGINES)} or give module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no engine '{name}': {error}") from None
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ValueError(f"'{name}' is not an engine: it must be a subclass of {Engine.__module__}.Engine")
    return found


def launched_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher says: Horovod's over Gloo, or Open MPI.

    Raises:
        RuntimeError: no launcher that sets them started this process.
    """
    for rank, size in (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("this process has no rank: start it with horovodrun or mpirun")


def _horovod_rank_and_size() -> tuple[int, int]:
    import horovod.torch as hvd

    return int(hvd.rank()), int(hvd.size())
