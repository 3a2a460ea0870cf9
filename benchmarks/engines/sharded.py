"""Engines that split what a model needs over the ranks: this library's stages, with whole blocks as units, and PyTorch's; and this
library's replicas."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, Held, OnTorch, gradients_of, held_by, run_backward
from hvd_ckpt.app.compare.runner.engines import DDP, HvdCkpt, variant
from hvd_ckpt.parallel.pipeline.chain import Chain


def units_of(model: nn.Module) -> list[nn.Module]:
    """The inner blocks of a chain, whether they are recomputed or not."""
    return [getattr(block, "layer", block) for block in list(model.children())[1:-1]]


class Stage(HvdCkpt):
    """This library with the model's states split over the ranks, and the backward passes of a step reduced together.

    Args:
        shard: the stage, from 1 to 3; other options may be those of ``hc.Shard``, too.
        offload: ``optimizer``, whose state is then on disk, or ``parameters``, too, where the model is built.
    """

    defaults: ClassVar[dict[str, Any]] = {"master_weights": False}
    reduces_by = ""  # a shard is not the gradient of a parameter

    def start(self, folder: Path) -> None:
        super().start(folder)
        self._folder = folder / "offload"
        self._folder.mkdir(exist_ok=True)

    def building(self) -> AbstractContextManager[Any]:
        on_disk = self.options.get("offload") == "parameters"
        return hc.init_on_disk(self._folder) if on_disk else super().building()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        # A chain that recomputes its blocks makes them units by itself.
        if self.options["shard"] == 3 and not isinstance(model, Chain):
            self.options["units"] = units_of(model)
        if "offload" in self.options:
            self.options["offload_folder"] = self._folder
        options = dict(self.options)
        names = {field.name for field in dataclasses.fields(hc.Shard)} & options.keys()
        shard = hc.Shard(options.pop("shard"), **{name: options.pop(name) for name in names})
        named = model.named_parameters()
        return model, hc.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            backward_passes_per_step=passes,
            shard=shard,
            model=model,
            **options,
        )

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        held = held_by([*model.parameters(), *(piece.parameter for piece in optimizer.pieces)], optimizer)
        # From stage 2 on the gradients of parameters have left: only those of the pieces are held.
        return (
            held if self.options["shard"] > 1 else held._replace(gradients=gradients_of(model.parameters()))
        )


class Replicas(HvdCkpt):
    """This library with logical ``replicas``, by default as many as ranks, among which a rank's micro-batches are divided."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        self.options = {"replicas": self.size, **self.options, "model": model}
        return super().wrap(model, optimizer)

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        optimizer.zero_grad()
        parts, each = iter(losses), len(losses) // len(optimizer.replicas.indices)
        means = []
        for replica in optimizer.local_replicas():
            with replica:
                means.append(sum(run_backward(loss, each) for loss in itertools.islice(parts, each)))
        optimizer.synchronize()
        return statistics.fmean(means)


class Zero(DDP):
    """ZeroRedundancyOptimizer with DistributedDataParallel: the optimizer's state is split, a parameter as a whole."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped, _ = super().wrap(model, optimizer, passes)
        parameters = list(wrapped.parameters())
        return wrapped, ZeroRedundancyOptimizer(parameters, type(optimizer), **optimizer.defaults)

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        return held_by(model.parameters(), optimizer.optim)


class FSDP2(OnTorch):
    """``fully_shard``: at ``stage`` 3 parameters are split again after forward, at stage 2 not before the end of backward."""

    @classmethod
    def unavailable(cls) -> str | None:
        here = torch.cuda.is_available() or hasattr(torch.cpu.Stream, "record_event")
        return None if here else f"FSDP2 of PyTorch {torch.__version__} does not run on CPUs"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.fsdp import fully_shard

        for block in units_of(model):
            fully_shard(block, reshard_after_forward=self.options["stage"] == 3)
        # The backward pass begins with what belongs to no block: split after the forward pass, it would be
        # gathered again at once.
        fully_shard(model, reshard_after_forward=False)
        return model, type(optimizer)(model.parameters(), **optimizer.defaults)


ENGINES: dict[str, type[Engine]] = {
    **{f"stage-{stage}": variant(Stage, shard=stage) for stage in (1, 2, 3)},
    "stage-3-offload": variant(Stage, shard=3, offload="optimizer"),
    "replicas": Replicas,
    "zero": Zero,
    "fsdp2-2": variant(FSDP2, stage=2),
    "fsdp2-3": variant(FSDP2, stage=3),
}
