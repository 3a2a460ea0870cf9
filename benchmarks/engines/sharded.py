"""Engines that split what a model needs over the ranks: this library's stages, with whole blocks as units, and PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_ckpt.app.compare.runner.engine import Engine, Held, OnTorch, held_by
from hvd_ckpt.app.compare.runner.engines import DDP, Sharded, variant


def units_of(model: nn.Module) -> list[nn.Module]:
    """The inner blocks of a chain, whether they are recomputed or not."""
    return [getattr(block, "block", block) for block in list(model.children())[1:-1]]


class Stage(Sharded):
    """This library at a stage, ``shard``; ``offload``: the optimizer's state is on disk."""

    def start(self, folder: Path) -> None:
        super().start(folder)
        self._folder = folder / "offload"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        if self.options["shard"] == 3:
            self.options["units"] = units_of(model)
        if "offload" in self.options:
            self._folder.mkdir(exist_ok=True)
            self.options["offload_folder"] = self._folder
        return super().wrap(model, optimizer, passes)


class Zero(DDP):
    """ZeroRedundancyOptimizer with DistributedDataParallel: the optimizer's state is split, a parameter as a whole."""

    title = "ZeroRedundancyOptimizer"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped, _ = super().wrap(model, optimizer, passes)
        parameters = list(wrapped.parameters())
        return wrapped, ZeroRedundancyOptimizer(parameters, type(optimizer), **optimizer.defaults)

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        return held_by(model.parameters(), optimizer.optim)


class FSDP2(OnTorch):
    """``fully_shard``: at ``stage`` 3 parameters are split again after forward, at stage 2 not before the end of backward."""

    title = "FSDP2"

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
    **{f"stage-{stage}": variant(Stage, f"hvd_ckpt, stage {stage}", shard=stage) for stage in (1, 2, 3)},
    "stage-3-offload": variant(Stage, "hvd_ckpt, stage 3, offload", shard=3, offload="optimizer"),
    "zero": Zero,
    "fsdp2-2": variant(FSDP2, "FSDP2, stage 2", stage=2),
    "fsdp2-3": variant(FSDP2, "FSDP2, stage 3", stage=3),
}
