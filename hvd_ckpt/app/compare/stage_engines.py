"""The engines of scenarios in pipeline stages: those of the harness, and what others need for skip connections and tied weights."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from hvd_ckpt.app.compare.runner.engine import OnTorch
from hvd_ckpt.app.compare.runner.jobs import launched_rank_and_size
from hvd_ckpt.app.compare.runner.stages import (
    Cut,
    HvdCkptStages,
    Stage,
    StageEngine,
    TorchStages,
    keep_blocks,
    made_again,
)
from hvd_ckpt.app.compare.stages import (
    CHUNKS,
    SAMPLES,
    VOCABULARY,
    WIDTH,
    Lengths,
    Pop,
    Skip,
    Stash,
    Tied,
    Uneven,
)
from hvd_ckpt.data.objectives import Batch


class TracingTorchStages(TorchStages):
    """``torch.distributed.pipelining``; where a skip connection joins blocks, its tracer cuts the model."""

    def stages_of(self, model: Any, cut: Cut) -> list[Any]:
        from torch.distributed import pipelining

        if not isinstance(model.scenario, Skip):
            return super().stages_of(model, cut)
        starts = [str(cut.blocks(stage).start) for stage in range(1, self.stages)]
        points = dict.fromkeys(starts, pipelining.SplitPoint.BEGINNING)
        example = model.scenario.batch(0, 1, 0).split(CHUNKS)[0].inputs
        traced = pipelining.pipeline(SkipByHand(*model), example, split_spec=points)
        stage = traced.build_stage(self.stage, self.device)
        # The tracer has parameters of its own: they take the place of the blocks'.
        for name, parameter in traced.get_stage_module(self.stage).named_parameters():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
        return [stage]


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
            # Back to the names of the reference: Handing adds "block.", and DeepSpeed names a tied layer by
            # its key, "0", as the first block is.
            name.replace("block.", "").removeprefix("tied_modules."): value
            for name, value in self._staged.state_dict().items()
            if name in names
        }


STAGE_ENGINES: tuple[type[StageEngine], ...] = (HvdCkptStages, TracingTorchStages, DeepSpeedStages)


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
