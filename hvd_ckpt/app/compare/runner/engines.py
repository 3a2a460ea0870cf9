"""The engines on data parallelism, and the registry.

Each is what that project's documentation tells its user to write, and no more. To add one, write a subclass of :class:`Engine` and
enter it in :data:`ENGINES`, or name it on the command line as ``module:Class``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import (
    Engine,
    Functions,
    Held,
    OnTorch,
    gradients_of,
    held_by,
    run_backward,
)
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.utils.named import import_named

if TYPE_CHECKING:
    from collections.abc import Iterator


class OneProcess(Engine):
    """No other ranks, and nothing to reduce: the engine of the reference."""

    title = "one process"
    rank, size = 0, 1

    def start(self, folder: Path) -> None:
        """Nothing: there are no other ranks."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return model, optimizer


class HorovodFamily(Engine):
    """The launcher, the recipes and the names that this library and stock Horovod share."""

    uses_horovod = True
    wraps_after_apex = False
    reduces_by = "horovod"

    def start(self, folder: Path) -> None:
        """What is left to do after the project's own start."""
        import horovod.torch as hvd

        self.rank, self.size = hvd.rank(), hvd.size()

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
        import horovod.torch as hvd

        mean: Tensor = hvd.allreduce(tensor)
        return mean

    def after_apex_backward(self, optimizer: Any) -> None:
        optimizer.synchronize()

    def apex_step(self, optimizer: Any) -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    @contextmanager
    def uneven(self, model: nn.Module) -> Iterator[None]:
        import horovod.torch as hvd

        yield
        # Ranks that are out of data add zeros to the sums of the others, and take no steps meanwhile. The
        # last one has taken all of them, so that its weights are the result.
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)


class HvdCkpt(HorovodFamily):
    """This library."""

    title = "hvd_ckpt"

    def start(self, folder: Path) -> None:
        hc.init()
        super().start(folder)

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        optimizer = hc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **self.options
        )
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
        hc.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def checkpoint(self, function: Callable[..., Any], *inputs: Any, use_reentrant: bool) -> Any:
        return hc.checkpoint(function, *inputs, use_reentrant=use_reentrant)

    def checkpoint_sequential(
        self, functions: Functions, segments: int, *inputs: Any, use_reentrant: bool, **shared: Any
    ) -> Any:
        return hc.checkpoint_sequential(functions, segments, *inputs, use_reentrant=use_reentrant, **shared)

    def grad_scaler(self, device: str) -> torch.amp.GradScaler:
        return hc.GradScaler(device)


class LogicalReplicas(HvdCkpt):
    """This library with as many logical replicas as ranks."""

    title = "hvd_ckpt, replicas"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        optimizer = hc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), model=model, replicas=self.size
        )
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, optimizer

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        optimizer.zero_grad()
        mean = 0.0
        for backward_pass in optimizer.local_replicas():
            with backward_pass:
                mean += sum(run_backward(loss, len(losses)) for loss in losses)
        optimizer.synchronize()
        return mean

    def refuses(self, workload: Any) -> str | None:
        return "replicas draw random numbers of their own; python -m benchmarks replicas compares them"


class Local(HvdCkpt):
    """This library's local SGD, by default with an average after every step; buffers stay each rank's own, as with the others."""

    title = "hvd_ckpt, local SGD"
    reduces_by = ""
    defaults: ClassVar[dict[str, Any]] = {"every": 1}

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return model, hc.LocalSGD(optimizer, list(model.named_parameters()), **self.options)

    def refuses(self, workload: Any) -> str | None:
        if workload.uneven or workload.scales_loss:
            return "ranks must take equally many steps, and an overflow skips a step of its rank only"
        if workload.half:
            return "each rank rounds its own half-precision weights before they are averaged"
        together = workload.alike or workload.static
        return None if together else "momentum rests on ranks that do not use a layer"


class Sharded(HvdCkpt):
    """This library with the model's states split over the ranks, and the backward passes of a step reduced together.

    Args:
        shard: the stage, from 1 to 3; other options may be those of ``hc.Shard``, too.
    """

    title = "hvd_ckpt, sharded"
    defaults: ClassVar[dict[str, Any]] = {"master_weights": False}
    reduces_by = ""  # a shard is not the gradient of a parameter

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        options = dict(self.options)
        names = {field.name for field in dataclasses.fields(hc.Shard)} & options.keys()
        shard = hc.Shard(options.pop("shard"), **{name: options.pop(name) for name in names})
        sharded = hc.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
            shard=shard,
            model=model,
            **options,
        )
        return model, sharded

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        pieces = [piece.parameter for piece in optimizer.pieces]
        held = held_by([*model.parameters(), *pieces], optimizer)
        # From stage 2 on the gradients of parameters have left: only those of the pieces are held.
        return (
            held if self.options["shard"] > 1 else held._replace(gradients=gradients_of(model.parameters()))
        )

    def refuses(self, workload: Any) -> str | None:
        if workload.uneven:
            return "sharded ranks need each other in every step"
        if self.options["shard"] == 3 and not workload.alike:
            return "where parameters are sharded, ranks gather each one together, so all must use the same layers"
        return None

    def weights(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        with optimizer.gathered_parameters():
            # Copies: the parameters have only this rank's part again when the context ends.
            return {name: value.clone() for name, value in super().weights(model, optimizer).items()}


class Horovod(HorovodFamily):
    """Horovod as it comes, with its own default fusion."""

    title = "Horovod"

    def start(self, folder: Path) -> None:
        import horovod.torch as hvd

        hvd.init()
        super().start(folder)

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
            **self.options,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def scaled_step(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)


class DDP(OnTorch):
    """PyTorch's DistributedDataParallel, each rank with its own batch-norm statistics as in Horovod."""

    title = "PyTorch DDP"
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


class ApexDDP(DDP):
    """NVIDIA Apex's DistributedDataParallel (up to Apex 25.05; CUDA only), over NCCL."""

    title = "Apex DDP"
    reduces_by = "apex"

    @classmethod
    def unavailable(cls) -> str | None:
        from hvd_ckpt.distributed.precision import apex_unavailable

        return apex_unavailable()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from apex.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer

    @contextmanager
    def uneven(self, model: nn.Module) -> Iterator[None]:
        yield  # it has nothing for it


def variant(engine: type[Engine], title: str, **options: Any) -> type[Engine]:
    """The same engine with other defaults of its options."""
    return type(engine.__name__, (engine,), {"title": title, "defaults": {**engine.defaults, **options}})


ENGINES: dict[str, type[Engine]] = {
    "hvd_ckpt": HvdCkpt,
    "horovod": Horovod,
    "horovod-groups": variant(Horovod, "Horovod, groups=2", groups=2),  # each travels as one
    "ddp": DDP,
    "ddp-find-unused": variant(DDP, "DDP find_unused", find_unused_parameters=True),
    "ddp-static": variant(DDP, "DDP static_graph", static_graph=True),
    "apex": ApexDDP,
    "shard-1": variant(Sharded, "hvd_ckpt, stage 1", shard=1),
    "shard-2": variant(Sharded, "hvd_ckpt, stage 2", shard=2),
    "shard-3": variant(Sharded, "hvd_ckpt, stage 3", shard=3),
    "replicas": LogicalReplicas,
    "local": Local,
}


def start_engine(name: str, job: RankJob, device: torch.device) -> Engine:
    """The engine of that name, which has joined the other ranks of the job."""
    engine = find_engine(name)()
    engine.device = device
    engine.start(job.folder)
    if engine.size != job.size:
        raise RuntimeError(f"the job has {engine.size} ranks instead of {job.size}")
    return engine


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
