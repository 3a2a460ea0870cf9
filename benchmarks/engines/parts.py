"""Engines that divide a model among ranks, which train it on one batch: pipeline stages, and layers in parts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.data.objectives import Batch

RECIPE = {
    "embedding.tokens": "vocabulary",
    "*.attention": "heads",
    "*.attention.project": "column",
    "*.attention.output": "row",
    "*.perceptron.0": "column",
    "*.perceptron.2": "row",
    "head.1": "vocabulary",
}
"""How PyTorch splits a GPT. A part gets other rows of a fused weight than this library's, which takes as long."""


class Divided(Engine):
    """Ranks that are one replica together, so each is rank 0 of 1 where batches are counted.

    Attributes:
        place, places: of this rank among those that divide the model; set by :meth:`start`.
    """

    place: int
    places: int

    def start(self, folder: Path) -> None:
        super().start(folder)
        self.place, self.places = self.rank, self.size
        self.rank, self.size = 0, 1


class Unstaged(Divided):
    """The whole model on one rank, micro-batch by micro-batch; and the base of all stages.

    Args:
        balance: the number of blocks of each stage.
        micro_batches: of a step.
        schedule: ``gpipe`` or ``1f1b``.
        checkpoint: as in :class:`hvd_ckpt.Pipeline`, for this library.
    """

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        self._run = self.cut(model)
        # The blocks of other stages leave the model.
        for number in set(range(len(model))) - set(self.blocks()):
            model[number] = nn.Module()
        return model, made_again(optimizer, model)

    def blocks(self) -> range:
        """The numbers of the blocks of this stage."""
        balance: list[int] = self.options["balance"]
        first = sum(balance[: self.place])
        return range(first, first + balance[self.place])

    def cut(self, model: nn.Sequential) -> Callable[[Batch], Tensor | None]:
        """What runs this stage's part of a step, and returns its loss where the stage has it."""

        def loss(part: Batch) -> Tensor:
            found: Tensor = self.workload.loss(model(*part.inputs), part.targets)
            return found

        return lambda batch: hc.accumulate(loss, batch, self.options["micro_batches"]).loss

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        optimizer.zero_grad()
        inputs, targets = self.example
        loss = self._run(Batch((inputs,), targets))
        return math.nan if loss is None else loss.item()


class Stages(Unstaged):
    """This library's ``Pipeline``."""

    uses_horovod = True
    pipeline: hc.Pipeline

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init(stages=self.places)

    def cut(self, model: nn.Sequential) -> Callable[[Batch], Tensor | None]:
        options = self.options
        self.pipeline = pipeline = hc.Pipeline(
            nn.Sequential(*model),
            options["balance"],
            chunks=options["micro_batches"],
            schedule=options["schedule"],
            checkpoint=options["checkpoint"],
        )
        return lambda batch: pipeline.accumulate(batch, self.workload.loss).loss


class TorchStages(Unstaged, OnTorch):
    """``torch.distributed.pipelining`` over Gloo, with the model cut by hand."""

    def cut(self, model: nn.Sequential) -> Callable[[Batch], Tensor | None]:
        from torch.distributed import pipelining

        blocks = nn.Sequential(*(model[number] for number in self.blocks()))
        stage = pipelining.PipelineStage(blocks, self.place, self.places, self.device)
        kinds: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        kind = kinds[self.options["schedule"]]
        schedule = kind(stage, self.options["micro_batches"], loss_fn=self.workload.loss)
        # PyTorch 2.6 cannot leave the outputs out.
        can_leave_out = "return_outputs" in inspect.signature(schedule.step).parameters
        options: dict[str, Any] = {"return_outputs": False} if can_leave_out else {}

        def step(batch: Batch) -> None:
            inputs = batch.inputs if self.place == 0 else ()
            if self.place == self.places - 1:
                schedule.step(*inputs, target=batch.targets, losses=[], **options)
            else:
                schedule.step(*inputs)

        return step


class Parts(Divided):
    """This library's ``tensor_parallel``."""

    uses_horovod = True

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init(tensor=self.places)

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        model = hc.tensor_parallel(model)
        return model, made_again(optimizer, model)


class TorchParts(Divided, OnTorch):
    """A GPT by PyTorch's ``parallelize_module``."""

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles: dict[Any, Any] = {
            "column": ColwiseParallel(),
            "row": RowwiseParallel(),
            ("vocabulary", nn.Embedding): RowwiseParallel(input_layouts=Replicate()),
            ("vocabulary", nn.Linear): ColwiseParallel(output_layouts=Replicate()),
        }
        plan: dict[str, Any] = {}
        for name, module in model.named_modules():
            kind = next((kind for pattern, kind in RECIPE.items() if fnmatchcase(name, pattern)), "")
            if kind == "heads":
                module.heads //= self.places
            elif kind:
                plan[name] = styles.get(kind) or styles[kind, type(module)]
        parallelize_module(model, init_device_mesh(self.device.type, (self.places,)), plan)
        return model, made_again(optimizer, model)


def made_again(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer of the same kind for what the model has now."""
    known = inspect.signature(type(optimizer)).parameters  # AdamW has defaults that it does not take
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)(model.parameters(), **options)


ENGINES: dict[str, type[Engine]] = {
    "stages": Stages,
    "torch-stages": TorchStages,
    "unstaged": Unstaged,
    "parts": Parts,
    "torch-parts": TorchParts,
}
