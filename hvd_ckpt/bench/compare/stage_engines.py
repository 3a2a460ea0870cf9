"""The engines of pipeline stages: how a process becomes a stage, and how micro-batches pass through.

What a stage trains stays in the whole model under its names, and the blocks of other stages leave it. So the weights and buffers
of a stage are compared with the reference as those of a rank are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.bench.compare.stages import (
    BLOCKS,
    CHUNKS,
    SAMPLES,
    SCHEDULES,
    VOCABULARY,
    WIDTH,
    Lengths,
    Pop,
    Skip,
    Stash,
    Tied,
    Uneven,
)
from hvd_ckpt.bench.harness.engine import Engine, OnTorch
from hvd_ckpt.bench.harness.jobs import launched_rank_and_size
from hvd_ckpt.bench.harness.peers import torch_schedule
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.planning.balance import balance_costs


class StageEngine(Engine):
    """Ranks with a stage each. Together they are one replica, so each is rank 0 of 1 where batches and seeds are counted.

    Attributes:
        stage: this rank's; set by :meth:`start`.
    """

    schedules: ClassVar[tuple[str, ...]] = SCHEDULES
    stage: int

    def start(self, folder: Path) -> None:
        super().start(folder)
        self.stage, self.stages = self.rank, self.size
        self.rank, self.size = 0, 1

    @property
    def balance(self) -> list[int]:
        """The number of blocks of each stage."""
        return balance_costs([1.0] * BLOCKS, self.stages)

    @property
    def own(self) -> range:
        """The numbers of this stage's blocks."""
        first = sum(self.balance[: self.stage])
        return range(first, first + self.balance[self.stage])


class HvdCkptStages(StageEngine):
    """This library's ``Pipeline``."""

    title = "hvd_ckpt"
    uses_horovod = True

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init(stages=self.stages)

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[Any, Optimizer]:
        staged = hc.Pipeline(nn.Sequential(*model), self.balance, chunks=CHUNKS, schedule=model.schedule)
        keep_blocks(model, self.own)
        scenario = model.scenario
        return (
            Stage(lambda batch: staged.accumulate(batch, scenario.loss, weight=scenario.weight).loss),
            made_again(optimizer, model),
        )


class TorchStages(StageEngine, OnTorch):
    """``torch.distributed.pipelining`` over Gloo, with the model cut by hand; with a skip connection, by its tracer."""

    title = "torch"

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[Any, Optimizer]:
        from torch.distributed import pipelining

        blocks, scenario = list(model), model.scenario
        keep_blocks(model, self.own)
        stage: Any
        if isinstance(scenario, Skip):
            starts = [str(sum(self.balance[:number])) for number in range(1, self.stages)]
            cuts = dict.fromkeys(starts, pipelining.SplitPoint.BEGINNING)
            example = scenario.batch(0, 1, 0).split(CHUNKS)[0].inputs
            traced = pipelining.pipeline(SkipByHand(*blocks), example, split_spec=cuts)
            stage = traced.build_stage(self.stage, self.device)
            # The tracer has parameters of its own: they take the place of the blocks'.
            for name, parameter in traced.get_stage_module(self.stage).named_parameters():
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, parameter)
        else:
            part = nn.Sequential(*(blocks[number] for number in self.own))
            stage = pipelining.PipelineStage(part, self.stage, self.stages, self.device)
        step = torch_schedule(model.schedule, [stage], CHUNKS, scenario.loss)
        return Stage(lambda batch: step(batch.inputs, batch.targets)), made_again(optimizer, model)


class DeepSpeedStages(StageEngine, OnTorch):
    """DeepSpeed's ``PipelineModule`` over Gloo; blocks that a skip connection joins hand on tuples."""

    title = "deepspeed"
    schedules = ("1f1b",)

    @classmethod
    def unavailable(cls) -> str | None:
        return None if importlib.util.find_spec("deepspeed") else "DeepSpeed is not installed"

    def start(self, folder: Path) -> None:
        # DeepSpeed reads both.
        os.environ.update(LOCAL_RANK=str(launched_rank_and_size()[0]), DS_ACCELERATOR="cpu")
        super().start(folder)

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[Any, Optimizer]:
        import deepspeed
        from deepspeed.pipe import PipelineModule, TiedLayerSpec

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        layers, scenario = list(model), model.scenario
        if isinstance(scenario, Skip):
            layers = [Handing(layer) for layer in layers]
        if isinstance(scenario, Tied):
            tied = functools.partial(
                TiedLayerSpec, "0", nn.Embedding, VOCABULARY, WIDTH, _weight=layers[0].weight
            )
            layers[0] = tied()
            layers[-1] = tied(forward_fn=lambda module, x: functional.linear(x, module.weight))
        self._staged = PipelineModule(
            layers,
            num_stages=self.stages,
            loss_fn=scenario.loss,
            partition_method="uniform",
            dynamic_shape=isinstance(scenario, Uneven | Lengths),
        )
        engine, *_ = deepspeed.initialize(
            model=self._staged,
            optimizer=made_again(optimizer, self._staged),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES // CHUNKS,
                "gradient_accumulation_steps": CHUNKS,
                "gradient_clipping": 0.0,  # by default it clips
            },
            dist_init_required=False,
        )
        # DeepSpeed cuts for itself.
        keep_blocks(model, range(*self._staged.parts[self.stage : self.stage + 2]))

        def step(batch: Batch) -> None:
            engine.train_batch(iter([(*part.inputs, part.targets) for part in batch.split(CHUNKS)]))

        return Stage(step), torch.optim.SGD(nn.Linear(1, 1).parameters())  # DeepSpeed updates within its step

    def weights(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        names = {name for name, _ in self._staged.named_parameters()}
        return {
            name.replace("block.", "").removeprefix("tied_modules."): value
            for name, value in self._staged.state_dict().items()
            if name in names
        }


STAGE_ENGINES: tuple[type[StageEngine], ...] = (HvdCkptStages, TorchStages, DeepSpeedStages)


class Stage(nn.Module):
    """In place of the whole model, what runs this stage's part of a step; its loss is nan where the stage has none."""

    def __init__(self, step: Callable[[Batch], Tensor | None]) -> None:
        super().__init__()
        self._step = step

    def accumulate(self, batch: Batch) -> Tensor:
        """Adds the gradients of a batch."""
        loss = self._step(batch)
        return torch.tensor(torch.nan) if loss is None else loss


class SkipByHand(nn.Sequential):
    """The computation of :class:`Skip`'s blocks as torch's tracer can read it."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: list[Any] = list(self)
        first, *others, last = blocks
        y = skip = torch.tanh(first.linear(x))
        for block in others:
            y = block(y)
        result: Tensor = torch.tanh(last.linear(y)) + skip
        return result


class Handing(nn.Module):
    """A block between those that a skip connection joins, which it is handed on through."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Any) -> Any:
        block: Any = self.block
        if isinstance(block, Stash):
            y = torch.tanh(block.linear(values))
            return y, y
        x, skip = values
        return torch.tanh(block.linear(x)) + skip if isinstance(block, Pop) else (block(x), skip)


def keep_blocks(model: nn.Sequential, own: range) -> None:
    """Takes the blocks out of the model that are not a stage's own; the others keep their names."""
    kept = {id(parameter) for number in own for parameter in model[number].parameters()}
    for number in set(range(len(model))) - set(own):
        empty = nn.Module()
        for name, parameter in model[number].named_parameters(recurse=False):
            if id(parameter) in kept:  # tied: the reference knows it by the first of its names
                empty.register_parameter(name, parameter)
        model[number] = empty


def made_again(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer of the same kind for what the model has now."""
    return type(optimizer)(model.parameters(), **optimizer.defaults)
