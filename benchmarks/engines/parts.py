"""Engines that split a model on one batch over ranks: pipeline stages, and layers in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.app.compare.runner.stages import HvdCkptStages, TorchStages, Unstaged, made_again


class Parts(Engine):
    """This library's ``tensor_parallel``; ranks together are one replica, so each is rank 0 of 1 where batches are counted."""

    title = "hvd_ckpt, parts"
    uses_horovod = True

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init(tensor=self.size)
        self.rank, self.size = 0, 1

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        model = hc.tensor_parallel(model)
        return model, made_again(optimizer, model)


class TorchParts(OnTorch):
    """PyTorch's ``parallelize_module`` of a GPT. A part gets other rows of a fused weight, which takes as long."""

    title = "PyTorch, parts"

    def start(self, folder: Path) -> None:
        super().start(folder)
        self._parts, self.rank, self.size = self.size, 0, 1

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {"embedding.tokens": RowwiseParallel(input_layouts=Replicate())}
        plan["head.1"] = ColwiseParallel(output_layouts=Replicate())
        for name, module in model.named_modules():
            if name.endswith(".attention"):
                plan |= {f"{name}.project": ColwiseParallel(), f"{name}.output": RowwiseParallel()}
                module.heads //= self._parts
            elif name.endswith(".perceptron"):
                plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh(self.device.type, (self._parts,)), plan)
        return model, made_again(optimizer, model)


ENGINES: dict[str, type[Engine]] = {
    "stages": HvdCkptStages,
    "torch-stages": TorchStages,
    "unstaged": Unstaged,
    "parts": Parts,
    "torch-parts": TorchParts,
}
