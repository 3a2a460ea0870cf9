"""The ranks of one engine: they time steps of every workload and schedule, and record memory, messages and a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.bench.harness.jobs import join_torch
from hvd_ckpt.bench.harness.peers import torch_schedule
from hvd_ckpt.bench.harness.workloads import RandomBatch, workload
from hvd_ckpt.bench.pipeline.command import UNSTAGED, VIRTUAL, Figures, Job, RankResult, Settings, Span
from hvd_ckpt.utils.memory import recording_peak

LEARNING_RATE = 1e-4
SECONDS_PER_BLOCK = 0.2  # that are measured, for the cuts
SIZES: dict[str, dict[str, Any]] = {  # a step of one rank takes about a second, in 8 micro-batches
    "gpt": {"batch": 8, "length": 128, "layers": 8},
    "resnet": {"batch": 32},
}
QUICK_BATCH = 8
QUICK_WARM_UP, WARM_UP = 1, 2  # steps

Batch = tuple[Tensor, Tensor]


def sized(settings: Settings, name: str) -> RandomBatch:
    """A workload in the size of these settings."""
    sizes = {"batch": QUICK_BATCH} if settings.quick else SIZES[name]
    return dataclasses.replace(workload(name, "quick" if settings.quick else "cpu"), **sizes)


def cuts(job: Job, name: str, schedule: str) -> list[int]:
    """The cuts of every engine: those whose longest chunk takes the least time."""
    return job.cuts[name][job.size * VIRTUAL[schedule]]


def all_cuts(settings: Settings, name: str) -> dict[int, list[int]]:
    """The cuts into each number of chunks that a job needs."""
    workload = sized(settings, name)
    torch.manual_seed(1)
    model = workload.model()
    sample = workload.sample(torch.Generator().manual_seed(1))[0].tensor_split(settings.chunks)[0]
    numbers = {size * VIRTUAL[schedule] for size in settings.sizes for schedule in settings.schedules}
    return {
        number: hc.balance_by_time(number, model, sample, timeout=SECONDS_PER_BLOCK) for number in numbers
    }


class Program(ABC):
    """One way to train; made for one workload and schedule."""

    def __init__(self, job: Job, name: str, schedule: str, checkpoint: str) -> None:
        self.job, self.checkpoint = job, checkpoint
        self.workload = sized(job.settings, name)
        self.batch = self.workload.sample(torch.Generator().manual_seed(1))
        torch.manual_seed(1)
        self.model = self.make(self.workload.model(), name, schedule)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    @abstractmethod
    def make(self, whole: nn.Sequential, name: str, schedule: str) -> nn.Module:
        """This rank's part of the model."""

    @abstractmethod
    def backward(self) -> None:
        """The forward and backward passes of a step."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step, which is run."""

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """Everything that this rank holds at the peak of a step."""
        self.step()  # makes the optimizer's state
        states = (value for state in self.optimizer.state.values() for value in state.values())
        held = [
            *self.model.parameters(),
            *self.model.buffers(),
            *(value for value in states if isinstance(value, Tensor)),
        ]
        gc.collect()
        with recording_peak() as memory:
            self.step()
        return memory.peak_bytes + sum(tensor.nbytes for tensor in held)


class Unstaged(Program):
    """The whole model on one rank, micro-batch by micro-batch."""

    def make(self, whole: nn.Sequential, name: str, schedule: str) -> nn.Module:
        return whole

    def backward(self) -> None:
        def loss(part: Batch) -> Tensor:
            return self.workload.loss(self.model(part[0]), part[1])

        hc.accumulate(loss, self.batch, self.job.settings.chunks, checkpoint=self.checkpoint)

    def sent_bytes(self) -> int:
        return 0


class Ours(Program):
    """``hvd_ckpt.Pipeline``."""

    model: hc.Pipeline

    def make(self, whole: nn.Sequential, name: str, schedule: str) -> nn.Module:
        return hc.Pipeline(
            whole,
            cuts(self.job, name, schedule),
            chunks=self.job.settings.chunks,
            schedule=schedule,
            virtual_stages=VIRTUAL[schedule],
            checkpoint=self.checkpoint,
        )

    def backward(self) -> None:
        self.model.accumulate(self.batch, self.workload.loss)

    def sent_bytes(self) -> int:
        # The library counts since the start: the step between two readings is the one that counts.
        before = self.model.sent_bytes
        self.step()
        return self.model.sent_bytes - before

    def timeline(self) -> list[Span]:
        """The spans of a step."""
        spans: list[Span] = []

        @contextlib.contextmanager
        def record(kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
            start = time.perf_counter()
            try:
                yield
            finally:  # a recomputation ends early
                spans.append(Span(kind, chunk, micro_batch, start, time.perf_counter()))

        self.model.recorder = record
        self.step()
        self.model.recorder = None
        return spans


class Torch(Program):
    """``torch.distributed.pipelining`` over Gloo, as its documentation has it."""

    def make(self, whole: nn.Sequential, name: str, schedule: str) -> nn.Module:
        from torch.distributed import pipelining

        balance = cuts(self.job, name, schedule)
        ends = [sum(balance[: part + 1]) for part in range(len(balance))]
        chunks = {
            part: nn.Sequential(*list(whole)[ends[part] - balance[part] : ends[part]])
            for part in range(torch.distributed.get_rank(), len(balance), self.job.size)
        }
        stages = [
            pipelining.PipelineStage(chunk, part, len(balance), torch.device("cpu"))
            for part, chunk in chunks.items()
        ]
        self._step = torch_schedule(schedule, stages, self.job.settings.chunks, self.workload.loss)
        return nn.ModuleList(chunks.values())

    def backward(self) -> None:
        inputs, targets = self.batch
        self._step([inputs], targets)

    def sent_bytes(self) -> int:
        operation, sent = torch.distributed.P2POp, 0

        def counted(kind: Any, tensor: Tensor, *more: Any, **named: Any) -> Any:
            nonlocal sent
            sent += tensor.nbytes if kind is torch.distributed.isend else 0
            return operation(kind, tensor, *more, **named)

        # PyTorch has no count of its own; all messages between stages are made as P2POp.
        with mock.patch("torch.distributed.P2POp", counted):
            self.step()
        return sent


PROGRAMS: dict[str, type[Program]] = {"hvd_ckpt": Ours, "torch": Torch, UNSTAGED: Unstaged}


def measure(job: Job) -> RankResult:
    """The measurements of one rank."""
    settings = job.settings
    if job.program == "hvd_ckpt":
        hc.init(stages=job.size)
    elif job.program == "torch":
        join_torch(job.folder)
    result = RankResult()
    for name in settings.workloads:
        if job.program == UNSTAGED and job.details:
            result.cuts[name] = all_cuts(settings, name)
        schedules = (UNSTAGED,) if job.program == UNSTAGED else settings.schedules
        result.figures[name] = {schedule: _figures(job, name, schedule) for schedule in schedules}
    if job.program == "torch":
        torch.distributed.destroy_process_group()
    return result


def _figures(job: Job, name: str, schedule: str) -> Figures:
    program = PROGRAMS[job.program](job, name, schedule, "never")
    # Objects of the imports and of the model are not collected again while the clock runs.
    gc.collect()
    gc.freeze()
    warm_up, seconds = QUICK_WARM_UP if job.settings.quick else WARM_UP, []
    for _ in range(warm_up + job.settings.steps):
        start = time.perf_counter()
        program.step()
        seconds.append(time.perf_counter() - start)
    gc.unfreeze()
    figures: Figures = {"seconds": seconds[warm_up:]}
    if job.details:
        figures |= {"sent_bytes": program.sent_bytes(), "peak_bytes": program.peak_bytes()}
        if isinstance(program, Ours):
            recomputing = Ours(job, name, schedule, "always")
            figures |= {
                "recomputed_peak_bytes": recomputing.peak_bytes(),
                "timelines": recomputing.timeline(),
            }
    return figures
