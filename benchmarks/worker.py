"""The worker in the ranks, one for all suites: build the workload, wrap it by the engine, examine a step, warm up, time steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from benchmarks.case import Case
from benchmarks.engines import find_engine
from benchmarks.probes import SETTLE, probes_of
from benchmarks.workloads import RandomBatch, workload
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.runner.jobs import RankJob, own_device, reason
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.training.optim import Schedule
from hvd_ckpt.utils.measure import now

Found = dict[str, Any]


@dataclass(frozen=True)
class MeasuredJob(RankJob):
    """Cases on the same ranks.

    Attributes:
        cases: in this order.
        columns: whose probes measure.
        optimizer, lr: of ``torch.optim``.
        cosine: the learning rate warms up and falls to 0 over the timed steps.
        warm_up, steps: of each case; ``together``, all cases take turns, each one step, and without steps are only examined.
        seed: of the weights and the samples.
        device: ``cpu`` or ``cuda``.
    """

    worker = "benchmarks.worker:measure"
    ends_at_once = True  # the orderly end of several engines in one process takes long

    cases: tuple[Case, ...]
    columns: tuple[str, ...]
    optimizer: str
    lr: float
    cosine: bool
    warm_up: int
    steps: int
    together: bool
    seed: int
    device: str


class Recomputed(nn.Module):
    """A block that the engine recomputes in the backward pass."""

    def __init__(self, block: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.block, self.engine = block, engine

    def forward(self, hidden: Tensor) -> Any:
        return self.engine.checkpoint(self.block, hidden, use_reentrant=False)


class Training:
    """A case under training, as its engine wraps it. Collective.

    Args:
        case, job: what is trained, and how.
        base: a model whose parameters and buffers the model shares, for engines that share.
        peaks: of the engines before this one, for engines that plan for them.

    Attributes:
        engine, model, optimizer: of the case.
        bare: the model as it was made.
        model_bytes: of all parameters.
        parts: the micro-batches of this step.
        steps: taken so far.
    """

    def __init__(self, case: Case, job: MeasuredJob, base: nn.Module | None = None, peaks: Any = None) -> None:
        options = dict(case.options)
        self._passes, recompute = options.pop("passes", 1), options.pop("recompute", False)
        self.workload: RandomBatch = workload(case.workload, case.sizes)
        self.engine = find_engine(case.engine)(**options)
        self.engine.device = device = own_device(job.device)
        self.engine.start(job.folder)
        self._job, self.steps, self._loss = job, 0, 0.0
        self.engine.workload, self.engine.peaks = self.workload, peaks or {}
        self.parts = self.batches(0)
        self.engine.example = self.parts[0]
        torch.manual_seed(job.seed + 1)
        bare: Any = base if base is not None and self.engine.shares else self.workload.model().to(device)
        self.bare, model = bare, twin(bare) if self.engine.shares else bare
        self.model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if recompute:
            for number in range(1, len(model) - 1):
                model[number] = Recomputed(model[number], self.engine)
        optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), lr=job.lr)
        # This library is told by synchronize(), at the end of a step, that all micro-batches are there.
        passes = 1 if isinstance(self.engine, HvdCkpt) else self._passes
        self.model, self.optimizer = self.engine.wrap(model, optimizer, passes)
        self._schedule = Schedule("cosine", job.lr, job.steps, job.steps // 20) if job.cosine else None

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step."""
        engine, first = self.engine, step * self._passes
        numbers = [(first + each) * engine.size + engine.rank for each in range(self._passes)]
        drawn = [self.workload.draw(number, self._job.seed) for number in numbers]
        return [(inputs.to(engine.device), targets.to(engine.device)) for inputs, targets in drawn]

    def prepare(self) -> None:
        """What comes before a step and is no part of its time: the batch, the learning rate, and what the engine needs."""
        if self.workload.changes:
            self.parts = self.batches(self.steps)
        if self._schedule is not None:
            self._schedule.apply(self.optimizer, min(self.steps, self._job.steps - 1))
        self.engine.prepare(self.model)

    def accumulate(self) -> float:
        """Forward and backward passes of a prepared step, until the gradients are ready; returns the mean loss."""
        losses = [functools.partial(self.loss, *part) for part in self.parts]
        self._loss = self.engine.accumulate(self.model, self.optimizer, losses)
        return self._loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        return self.workload.loss(self.model(inputs), targets)

    def update(self) -> None:
        """The optimizer's step."""
        self.engine.update(self.model, self.optimizer)
        self.steps += 1

    def step(self) -> None:
        """A whole step."""
        self.timed()

    def timed(self) -> float:
        """Seconds of a step that is prepared."""
        self.prepare()
        start = now(self.engine.device)
        self.accumulate()
        self.update()
        return now(self.engine.device) - start

    def final_loss(self) -> float:
        """The loss of the last step, or where there are held-out samples that of the mean of the ranks' weights on them."""
        batch = self.workload.held_out()
        if batch is None:
            return self._loss
        parameters = list(self.model.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, own):
                parameter.copy_(self.engine.mean(value))
            found = self.loss(*(tensor.to(self.engine.device) for tensor in batch)).item()
            for parameter, value in zip(parameters, own):
                parameter.copy_(value)
        return found


def twin(model: nn.Module) -> Any:
    """A copy of the modules that shares parameters and buffers with the original: wrapping one leaves the other as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class Bench:
    """All cases of a job on one rank."""

    def __init__(self, job: MeasuredJob) -> None:
        self.job = job
        self.found: list[Found] = [{"seconds": []} for _ in job.cases]
        self._trainings: dict[int, Training] = {}
        self._bases: dict[str, nn.Module] = {}

    def build(self, number: int) -> Training:
        """A case, ready for its first step."""
        case = self.job.cases[number]
        # Peaks of engines before this one, for those that plan for a budget.
        peaks = {
            other.engine: figures["step_bytes"]
            for other, figures in zip(self.job.cases, self.found)
            if "step_bytes" in figures and other.workload == case.workload
        }
        training = Training(case, self.job, self._bases.get(case.workload), peaks)
        if training.engine.shares:
            self._bases.setdefault(case.workload, training.bare)
        return training

    def examine(self, number: int) -> None:
        """Examines the third step of a training of its own."""
        probes = [probe() for probe in probes_of(self.job.columns) if probe.examines]
        if not probes:
            return
        # Models that share their weights are not built anew, and plans cannot be made while memory is recorded.
        training = self.build(number) if find_engine(self.job.cases[number].engine).shares else None
        for probe in probes:
            probe.start(own_device(self.job.device))
        try:
            training = training or self.build(number)
            for _ in range(SETTLE):
                training.step()
            training.prepare()
            for probe in probes:
                probe.before_step(training)
            loss = training.accumulate()
            for probe in probes:
                probe.ready(training, loss)
            training.update()
        finally:
            for probe in probes:
                probe.stop()
        for probe in probes:
            probe.note(training)
            self.found[number] |= probe.figures

    def start(self, number: int) -> None:
        """Builds and warms up a case that will be timed."""
        self._trainings[number] = training = self.build(number)
        for _ in range(self.job.warm_up):
            training.step()

    def time(self, number: int) -> None:
        """Times one step of a case."""
        self.found[number]["seconds"].append(self._trainings[number].timed())

    def finish(self, number: int) -> None:
        """Ends a case that was timed."""
        training = self._trainings.pop(number)
        for probe in probes_of(self.job.columns):
            self.found[number] |= probe().finish(training)

    def alone(self) -> None:
        """All cases, one after the other, which are examined when all are timed; an error ends the job."""
        for number in range(len(self.job.cases)):
            self.start(number)
            with frozen():
                for _ in range(self.job.steps):
                    self.time(number)
            self.finish(number)
            gc.collect()
        for number in range(len(self.job.cases)):
            self.examine(number)
            gc.collect()

    def together(self) -> None:
        """All cases in turn, step by step; what fails on any rank is left out on all of them."""
        if self.job.size > 1:
            self._join()
        numbers = range(len(self.job.cases))
        running = [number for number in numbers if self._on_all(self.examine, number)]
        if not self.job.steps:
            return
        running = [number for number in running if self._on_all(self.start, number)]
        with frozen():
            for _, number in alternating(running, self.job.steps):
                if self.job.size > 1:
                    hc.barrier()
                self.time(number)
        for number in running:
            self._on_all(self.finish, number)

    def _join(self) -> None:
        """Starts Horovod before the first case, as the engines do where one does: it changes nothing between cases."""
        engines = (find_engine(case.engine) for case in self.job.cases)
        starting = next((engine for engine in engines if engine.uses_horovod), None)
        hc.init() if starting is None else starting().start(self.job.folder)

    def _on_all(self, work: Any, number: int) -> bool:
        print(self.job.cases[number], flush=True)
        try:
            work(number)
        except Exception as error:
            traceback.print_exc()
            self.found[number]["failure"] = reason(error)
        failed = "failure" in self.found[number]
        return not (any(hc.allgather_object(failed)) if self.job.size > 1 else failed)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What is collected within a step is what the step leaves, and nothing that was there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(job: MeasuredJob) -> list[Found]:
    """For each case its figures: ``seconds`` of each timed step, those of the probes by name, and maybe a ``failure``."""
    bench = Bench(job)
    bench.together() if job.together else bench.alone()
    return bench.found
