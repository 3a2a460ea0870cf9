"""Engines that split a model on one batch over ranks: pipeline stages, and layers in parts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.parts import TorchParts
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


class GptParts(TorchParts):
    """A GPT by PyTorch's ``parallelize_module``. A part gets other rows of a fused weight, which takes as long."""

    title = "PyTorch, parts"
    recipe: ClassVar[dict[str, str]] = {
        "embedding.tokens": "vocabulary",
        "*.attention": "heads:heads",
        "*.attention.project": "column",
        "*.attention.output": "row",
        "*.perceptron.0": "column",
        "*.perceptron.2": "row",
        "head.1": "vocabulary",
    }


ENGINES: dict[str, type[Engine]] = {
    "stages": HvdCkptStages,
    "torch-stages": TorchStages,
    "unstaged": Unstaged,
    "parts": Parts,
    "torch-parts": GptParts,
}
