"""The engines of parts of layers: how a process becomes a part, and how a model is split by its ``recipe``.

Parts together are one replica, so each is rank 0 of 1 where batches and seeds are counted.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import OnTorch
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.runner.jobs import launched_rank_and_size
from hvd_ckpt.app.compare.runner.stages import made_again


class HvdCkptParts(HvdCkpt):
    """This library's ``tensor_parallel``; without a recipe, with the library's own."""

    reduces_by = ""  # there is one replica

    def start(self, folder: Path) -> None:
        _, self.stages = launched_rank_and_size()
        hc.init(tensor=self.stages)
        self.rank, self.size = hc.rank(), hc.size()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        split = hc.tensor_parallel(model, getattr(model, "recipe", None))
        return super().wrap(split, optimizer, passes)

    def weights(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        state: dict[str, Tensor] = optimizer.full_model_state_dict(model, all_ranks=True)
        return state


class TorchParts(OnTorch):
    """PyTorch's ``parallelize_module``, as a recipe of this library says.

    Attributes:
        recipe: of models that have none.
    """

    title = "torch"
    recipe: ClassVar[dict[str, str]] = {}

    def start(self, folder: Path) -> None:
        super().start(folder)
        self.stages, self.rank, self.size = self.size, 0, 1

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {}
        recipe = getattr(model, "recipe", self.recipe)
        for name, module in model.named_modules():
            kind = next((kind for pattern, kind in recipe.items() if fnmatchcase(name, pattern)), "")
            if kind.startswith("heads:"):
                attribute = kind.removeprefix("heads:")
                setattr(module, attribute, getattr(module, attribute) // self.stages)
            elif kind == "vocabulary" and isinstance(module, nn.Embedding):
                plan[name] = RowwiseParallel(input_layouts=Replicate())
            elif kind == "vocabulary":
                plan[name] = ColwiseParallel(output_layouts=Replicate())
            elif kind:
                plan[name] = {"column": ColwiseParallel, "row": RowwiseParallel}[kind]()
        parallelize_module(model, init_device_mesh(self.device.type, (self.stages,)), plan)
        return model, made_again(optimizer, model)

    def weights(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        return {
            name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
            for name, parameter in model.named_parameters()
        }
