"""The engines of the comparison, and the registry.

Each is what that project's documentation tells its user to write, and no more. To add one, write a subclass of :class:`Engine` and
enter it in :data:`ENGINES`, or name it on the command line as ``module:Class``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch, run_backward
from hvd_ckpt.utils.named import import_named


class OneProcess(Engine):
    """No other ranks, and nothing to reduce: the engine of the reference."""

    rank, size = 0, 1

    def start(self, folder: Path) -> None:
        """Nothing: there are no other ranks."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return model, optimizer


class HorovodFamily(Engine):
    """What this library and stock Horovod share, which is all but an import."""

    uses_horovod = True
    wraps_after_apex = False
    reduces_by = "horovod"
    project: Any

    def start(self, folder: Path) -> None:
        self.project.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        named = model.named_parameters()
        optimizer = self.project.DistributedOptimizer(optimizer, named_parameters=named, **self.options)
        self.project.broadcast_parameters(model.state_dict(), root_rank=0)
        self.project.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        # Gradients must be ready when accumulate() ends, and step() would be the one to wait for them. So
        # update() leaves the wait out.
        mean = super().accumulate(model, optimizer, losses)
        optimizer.synchronize()
        return mean

    def update(self, model: nn.Module, optimizer: Any) -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    def mean(self, tensor: Tensor) -> Tensor:
        return hvd.allreduce(tensor, name="hvd_ckpt.compare.mean")

    def after_apex_backward(self, optimizer: Any) -> None:
        optimizer.synchronize()

    @contextmanager
    def uneven(self, model: nn.Module) -> Iterator[None]:
        yield
        # Ranks that are out of data add zeros to the sums of the others, and take no steps meanwhile. The
        # last one has taken all of them, so that its weights are the result.
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)


class HvdCkpt(HorovodFamily):
    """This library."""

    project = hc
    checkpoint: Callable[..., Any] = staticmethod(hc.checkpoint)
    checkpoint_sequential: Callable[..., Any] = staticmethod(hc.checkpoint_sequential)
    grad_scaler: Callable[..., Any] = staticmethod(hc.GradScaler)


class Horovod(HorovodFamily):
    """Horovod as it comes, with its own default fusion."""

    project = hvd

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        self.options["backward_passes_per_step"] = passes  # which this library learns
        return super().wrap(model, optimizer)

    def scaled_step(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)


class DDP(OnTorch):
    """PyTorch's DistributedDataParallel, each rank with its own batch-norm statistics as in Horovod."""

    reduces_by = "ddp"
    defaults: ClassVar[dict[str, Any]] = {"broadcast_buffers": False}

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        wrapped = nn.parallel.DistributedDataParallel(model, **self.options)
        return wrapped, optimizer

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        optimizer.zero_grad()
        with model.no_sync():
            mean = sum(run_backward(loss, len(losses)) for loss in losses[:-1])
        return mean + run_backward(losses[-1], len(losses))

    @contextmanager
    def uneven(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        with model.join():
            yield


class ApexDDP(OnTorch):
    """NVIDIA Apex's DistributedDataParallel (up to Apex 25.05; CUDA only), over NCCL; it has nothing for uneven steps."""

    reduces_by = "apex"

    @classmethod
    def unavailable(cls) -> str | None:
        from hvd_ckpt.distributed.precision import apex_unavailable

        return apex_unavailable()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from apex.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer


def variant(engine: type[Engine], **options: Any) -> type[Engine]:
    """The same engine with other defaults of its options."""
    return type(engine.__name__, (engine,), {"defaults": {**engine.defaults, **options}})


ENGINES: dict[str, type[Engine]] = {
    "hvd_ckpt": HvdCkpt,
    "horovod": Horovod,
    "horovod-groups": variant(Horovod, groups=2),  # each travels as one
    "ddp": DDP,
    "ddp-find-unused": variant(DDP, find_unused_parameters=True),
    "ddp-static": variant(DDP, static_graph=True),
    "apex": ApexDDP,
}


def find_engine(name: str, known: Mapping[str, type[Engine]] = ENGINES) -> type[Engine]:
    """The engine of that name among ``known`` ones, or the class that ``module:Class`` names.

    Raises:
        ValueError: the name is unknown, or ``module:Class`` is not an engine.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ValueError(f"no engine '{name}': choose among {', '.join(known)} or give module:Class")
    engine = import_named("engine", name)
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise ValueError(f"'{name}' is not an engine: it must be a subclass of {Engine.__module__}.Engine")
    return engine
