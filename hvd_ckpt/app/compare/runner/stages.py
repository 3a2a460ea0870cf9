"""The engines of pipeline stages: how a process becomes a stage, and how micro-batches pass through.

What a stage trains stays in the whole model under its names, and the blocks of other stages leave it. So the weights and buffers
of a stage can be compared with those of the whole model.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.data.objectives import Batch


@dataclass(frozen=True)
class Cut:
    """How a chain is cut into chunks, and what a step computes.

    Attributes:
        balance: the number of blocks of each chunk; chunks go to the stages in turn.
        micro_batches: of a step.
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``; None where the model is whole.
        loss: of a micro-batch, from output and targets.
        weight: the number of terms that the loss of a micro-batch is the mean of, where that is not the number of its samples.
        checkpoint: as in :class:`hvd_ckpt.Pipeline`, for engines of this library.
    """

    balance: Sequence[int]
    micro_batches: int
    schedule: str | None
    loss: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Batch], int] | None = None
    checkpoint: str | None = None

    def blocks(self, chunk: int) -> range:
        """The numbers of a chunk's blocks."""
        first = sum(self.balance[:chunk])
        return range(first, first + self.balance[chunk])


class Stage(nn.Module):
    """In place of the whole model, what runs this stage's part of a step; its loss is nan where the stage has none.

    Attributes:
        pipeline: this library's, if the stage is one of it.
    """

    def __init__(self, step: Callable[[Batch], Tensor | None], pipeline: hc.Pipeline | None = None) -> None:
        super().__init__()
        self._step = step
        self.pipeline = pipeline

    def accumulate(self, batch: Batch) -> Tensor:
        """Adds the gradients of a batch."""
        loss = self._step(batch)
        return torch.tensor(torch.nan) if loss is None else loss


class StageEngine(Engine):
    """Ranks with a stage each. Together they are one replica, so each is rank 0 of 1 where batches and seeds are counted.

    Attributes:
        stage: this rank's; set by :meth:`start`.
    """

    schedules: ClassVar[tuple[str, ...]] = ("gpipe", "1f1b")
    stage: int

    def start(self, folder: Path) -> None:
        super().start(folder)
        self.stage, self.stages = self.rank, self.size
        self.rank, self.size = 0, 1

    @abstractmethod
    def cut(self, model: nn.Sequential, cut: Cut) -> Stage:
        """Cuts the model, in which the blocks of this stage remain, and returns what runs them."""

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[Any, Optimizer]:
        """Cuts a model that knows its cut, or any chain as the options say."""
        knows = hasattr(model, "cut")
        cut = model.cut(self.stages) if knows else Cut(loss=self.workload.loss, **self.options)
        stage = self.cut(model, cut)
        return stage, made_again(optimizer, model)

    def own(self, cut: Cut) -> dict[int, range]:
        """The chunks of this stage, and the numbers of their blocks."""
        return {chunk: cut.blocks(chunk) for chunk in range(self.stage, len(cut.balance), self.stages)}

    def sent_by(self, stage: Stage, step: Callable[[], object]) -> int:
        """Bytes that this rank sends in a step, which is run."""
        step()
        return 0


class Unstaged(StageEngine):
    """The whole model on one rank, micro-batch by micro-batch."""

    title = "unstaged"

    def cut(self, model: nn.Sequential, cut: Cut) -> Stage:
        def loss(part: Batch) -> Tensor:
            return cut.loss(model(*part.inputs), part.targets)

        return Stage(lambda batch: hc.accumulate(loss, batch, cut.micro_batches, weight=cut.weight).loss)


class HvdCkptStages(StageEngine):
    """This library's ``Pipeline``."""

    title = "hvd_ckpt"
    uses_horovod = True

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init(stages=self.stages)

    def cut(self, model: nn.Sequential, cut: Cut) -> Stage:
        pipeline = hc.Pipeline(
            nn.Sequential(*model),
            cut.balance,
            chunks=cut.micro_batches,
            schedule=cut.schedule,
            virtual_stages=len(cut.balance) // self.stages,
            checkpoint=cut.checkpoint,
        )
        keep_blocks(model, {number for chunk in self.own(cut).values() for number in chunk})
        return Stage(lambda batch: pipeline.accumulate(batch, cut.loss, weight=cut.weight).loss, pipeline)

    def sent_by(self, stage: Any, step: Callable[[], object]) -> int:
        # The library counts since the start: the step between two readings is the one that counts.
        before: int = stage.pipeline.sent_bytes
        step()
        after: int = stage.pipeline.sent_bytes
        return after - before


class TorchStages(StageEngine, OnTorch):
    """``torch.distributed.pipelining`` over Gloo, with the model cut by hand."""

    title = "torch"

    def cut(self, model: nn.Sequential, cut: Cut) -> Stage:
        from torch.distributed import pipelining

        stages = self.stages_of(model, cut)
        kinds: dict[Any, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        kind, given = kinds.get(cut.schedule), stages[0]
        if kind is None:
            kind, given = pipelining.ScheduleInterleaved1F1B, stages
        schedule = kind(given, cut.micro_batches, loss_fn=cut.loss)
        # PyTorch 2.6 cannot leave the outputs out.
        can_leave_out = "return_outputs" in inspect.signature(schedule.step).parameters
        options: dict[str, Any] = {"return_outputs": False} if can_leave_out else {}

        def step(batch: Batch) -> None:
            inputs = batch.inputs if self.stage == 0 else ()
            if self.stage == self.stages - 1:
                schedule.step(*inputs, target=batch.targets, losses=[], **options)
            else:
                schedule.step(*inputs)

        keep_blocks(model, {number for chunk in self.own(cut).values() for number in chunk})
        return Stage(step)

    def stages_of(self, model: nn.Sequential, cut: Cut) -> list[Any]:
        """The stages of this rank, one for each of its chunks."""
        from torch.distributed.pipelining import PipelineStage

        return [
            PipelineStage(
                nn.Sequential(*(model[number] for number in blocks)), chunk, len(cut.balance), self.device
            )
            for chunk, blocks in self.own(cut).items()
        ]

    def sent_by(self, stage: Stage, step: Callable[[], object]) -> int:
        operation, sent = torch.distributed.P2POp, 0

        def counted(kind: Any, tensor: Tensor, *more: Any, **named: Any) -> Any:
            nonlocal sent
            sent += tensor.nbytes if kind is torch.distributed.isend else 0
            return operation(kind, tensor, *more, **named)

        # PyTorch has no count of its own; all messages between stages are made as P2POp.
        with mock.patch("torch.distributed.P2POp", counted):
            step()
        return sent


def keep_blocks(model: nn.Sequential, own: Collection[int]) -> None:
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
    known = inspect.signature(type(optimizer)).parameters  # AdamW has defaults that it does not take
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)(model.parameters(), **options)
