"""The ranks of one engine: they time steps of every workload and schedule, and record memory, messages and a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.pipeline.command import UNSTAGED, VIRTUAL, Figures, Job, RankResult, Settings, Span
from hvd_ckpt.app.compare.runner.stages import (
    Cut,
    HvdCkptStages,
    StageEngine,
    TorchStages,
    Unstaged,
)
from hvd_ckpt.app.compare.runner.workloads import RandomBatch, workload
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.utils.memory import recording_peak

LEARNING_RATE = 1e-4
SECONDS_PER_BLOCK = 0.2  # that are measured, for the cuts
SIZES: dict[str, dict[str, Any]] = {  # a step of one rank takes about a second, in 8 micro-batches
    "gpt": {"batch": 8, "length": 128, "layers": 8},
    "resnet": {"batch": 32},
}
QUICK_BATCH = 8
QUICK_WARM_UP, WARM_UP = 1, 2  # steps


def sized(settings: Settings, name: str) -> RandomBatch:
    """A workload in the size of these settings."""
    sizes = {"batch": QUICK_BATCH} if settings.quick else SIZES[name]
    return dataclasses.replace(workload(name, "quick" if settings.quick else "cpu"), **sizes)


def all_cuts(settings: Settings, name: str) -> dict[int, list[int]]:
    """The cuts into each number of chunks that a job needs."""
    workload = sized(settings, name)
    torch.manual_seed(1)
    model = workload.model()
    inputs, _ = workload.sample(torch.Generator().manual_seed(1))
    sample = inputs.tensor_split(settings.chunks)[0]
    numbers = {size * VIRTUAL[schedule] for size in settings.sizes for schedule in settings.schedules}
    return {
        number: hc.balance_by_time(number, model, sample, timeout=SECONDS_PER_BLOCK) for number in numbers
    }


PROGRAMS: dict[str, type[StageEngine]] = {
    "hvd_ckpt": HvdCkptStages,
    "torch": TorchStages,
    UNSTAGED: Unstaged,
}


class Program:
    """An engine that trains one workload in one schedule."""

    def __init__(self, engine: StageEngine, job: Job, name: str, schedule: str, checkpoint: str) -> None:
        workload = sized(job.settings, name)
        inputs, targets = workload.sample(torch.Generator().manual_seed(1))
        self.batch = Batch((inputs,), targets)
        torch.manual_seed(1)
        self.model = workload.model()
        balance = [len(self.model)] if schedule == UNSTAGED else job.cuts[name][job.size * VIRTUAL[schedule]]
        cut = Cut(balance, job.settings.chunks, schedule, workload.loss, checkpoint=checkpoint)
        self.engine, self.stage = engine, engine.cut(self.model, cut)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self.stage.accumulate(self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return self.engine.sent_by(self.stage, self.step)

    def peak_bytes(self) -> int:
        """Everything that this rank holds at the peak of a step."""
        self.step()  # makes the optimizer's state
        # What is there before a step is counted by its tensors, and what the step adds by the allocator.
        # Gradients are part of the latter: the step before has dropped them.
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

    def timeline(self) -> list[Span]:
        """The spans of a step of this library's pipeline."""
        spans, pipeline = list[Span](), self.stage.pipeline
        assert pipeline is not None

        @contextlib.contextmanager
        def record(kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
            start = time.perf_counter()
            try:
                yield
            finally:  # a recomputation ends early
                spans.append(Span(kind, chunk, micro_batch, start, time.perf_counter()))

        pipeline.recorder = record
        self.step()
        pipeline.recorder = None
        return spans


def measure(job: Job) -> RankResult:
    """The measurements of one rank."""
    settings = job.settings
    engine = PROGRAMS[job.program]()
    engine.start(job.folder)
    result = RankResult()
    for name in settings.workloads:
        if job.program == UNSTAGED and job.details:
            result.cuts[name] = all_cuts(settings, name)
        schedules = (UNSTAGED,) if job.program == UNSTAGED else settings.schedules
        result.figures[name] = {schedule: _figures(engine, job, name, schedule) for schedule in schedules}
    engine.stop()
    return result


def _figures(engine: StageEngine, job: Job, name: str, schedule: str) -> Figures:
    program = Program(engine, job, name, schedule, "never")
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
    if job.details and program.stage.pipeline is not None:
        recomputing = Program(engine, job, name, schedule, "always")
        figures |= {
            "recomputed_peak_bytes": recomputing.peak_bytes(),
            "timelines": recomputing.timeline(),
        }
    return figures
