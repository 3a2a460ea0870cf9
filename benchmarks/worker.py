"""The worker in the ranks, one for all suites: build the workload, wrap it by the engine, warm up, time steps, examine one."""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.case import Case, Found, MeasuredJob
from benchmarks.engines import find_engine
from benchmarks.probes import AFTER_EXAMINED, AFTER_TIMED, EXAMINED, examine
from benchmarks.suites import find_suite
from benchmarks.workloads import RandomBatch, workload
from hvd_ckpt.app.compare.cells import Cell, Recompute, RecomputedLayer
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.runner.jobs import own_device, reason
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.training.optim import Schedule
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.named import import_named


class Training:
    """A case under training, as its engine wraps it. Collective.

    Args:
        case, job: what is trained, and how.

    Attributes:
        engine, model, optimizer: of the case.
        model_bytes: of all parameters.
        parts: the micro-batches of this step.
        losses: the mean loss of each step so far.
    """

    def __init__(self, case: Case, job: MeasuredJob) -> None:
        options = dict(case.options)
        self._passes, recompute = options.pop("passes", 1), options.pop("recompute", False)
        self.workload: RandomBatch = workload(case.workload, case.sizes)
        self.engine = find_engine(case.engine)(**options)
        self.engine.device = own_device(job.device)
        self.engine.start(job.folder)
        self._job, self.losses = job, list[float]()
        suite = find_suite(job.suite)
        self.engine.workload = self.workload
        self.parts = self.batches(0)
        self.engine.example = self.parts[0]
        torch.manual_seed(job.seed + 1)
        with self.engine.building():
            model: Any = self.workload.model().to(self.engine.device)
        self.model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if recompute:
            way = Recompute(Cell(case.workload, "non-reentrant", 1), self.engine)
            for number in range(1, len(model) - 1):
                model[number] = RecomputedLayer(model[number], way)
        optimizer = getattr(torch.optim, suite.optimizer)(model.parameters(), lr=suite.lr)
        # This library is told by synchronize(), at the end of a step, that all micro-batches are there.
        passes = 1 if isinstance(self.engine, HvdCkpt) else self._passes
        self.model, self.optimizer = self.engine.wrap(model, optimizer, passes)
        self._schedule = Schedule("cosine", suite.lr, job.steps, job.steps // 20) if suite.cosine else None

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step."""
        engine = self.engine
        first = (step * engine.size + engine.rank) * self._passes
        drawn = [self.workload.draw(first + each, self._job.seed) for each in range(self._passes)]
        return [(inputs.to(engine.device), targets.to(engine.device)) for inputs, targets in drawn]

    def prepare(self) -> None:
        """What comes before a step and is no part of its time: the batch, the learning rate, and what the engine needs."""
        if self.workload.changes:
            self.parts = self.batches(len(self.losses))
        if self._schedule is not None:
            self._schedule.apply(self.optimizer, min(len(self.losses), self._job.steps - 1))
        self.engine.prepare(self.model)

    def accumulate(self) -> float:
        """Forward and backward passes of a prepared step, until the gradients are ready; returns the mean loss."""
        losses = [functools.partial(self.loss, *part) for part in self.parts]
        self.losses.append(self.engine.accumulate(self.model, self.optimizer, losses))
        return self.losses[-1]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        return self.workload.loss(self.model(inputs), targets)

    def update(self) -> None:
        """The optimizer's step."""
        self.engine.update(self.model, self.optimizer)

    def step(self) -> float:
        """A whole step; returns its seconds from when it is prepared."""
        self.prepare()
        start = now(self.engine.device)
        self.accumulate()
        self.update()
        return now(self.engine.device) - start


class Bench:
    """All cases of a job on one rank: each is timed, or all in turn, and then examined: a profiler slows down what follows."""

    def __init__(self, job: MeasuredJob) -> None:
        self.job, self.suite = job, find_suite(job.suite)
        self.found: list[Found] = [{"seconds": []} for _ in job.cases]
        self._trainings: dict[int, Training] = {}

    def run(self) -> None:
        """All cases. Of those that are together, what fails on any rank is left out on all of them; else an error ends the job."""
        job, together, numbers = self.job, self.suite.together, range(len(self.job.cases))
        if together and job.size > 1:
            # Horovod starts before the first case, as the engines do where one does: it changes nothing between cases.
            engines = (find_engine(case.engine) for case in job.cases)
            starting = next((engine for engine in engines if engine.uses_horovod), None)
            hc.init() if starting is None else starting().start(job.folder)
        for group in [numbers] if together else [range(number, number + 1) for number in numbers]:
            running = [number for number in group if self._on_all(self._start, number)]
            with frozen():
                for _, number in alternating(running, job.steps):
                    if together and job.size > 1:
                        hc.barrier()
                    self.found[number]["seconds"].append(self._trainings[number].step())
                    job.tell("step", case=number)
            for number in running:
                self._on_all(self._finish, number)
            gc.collect()
        for number in numbers if EXAMINED.intersection(self.suite.columns) else ():
            if "failure" not in self.found[number]:
                self._on_all(self._examine, number)
                gc.collect()

    def _start(self, number: int) -> None:
        self._trainings[number] = training = Training(self.job.cases[number], self.job)
        for _ in range(self.suite.warm_up):
            training.step()

    def _finish(self, number: int) -> None:
        training = self._trainings.pop(number)
        for column, measure in AFTER_TIMED.items():
            if column in self.suite.columns:
                self.found[number] |= measure(training)

    def _examine(self, number: int) -> None:
        build = functools.partial(Training, self.job.cases[number], self.job)
        training, figures = examine(build, own_device(self.job.device), self.suite.columns)
        for column, measure in AFTER_EXAMINED.items():
            if column in self.suite.columns:
                figures |= measure(training)
        self.found[number] |= figures

    def _on_all(self, work: Callable[[int], None], number: int) -> bool:
        """Does something with a case; whether no rank has failed."""
        # A job of which nothing is heard for long is taken for one that hangs.
        self.job.tell("case", case=number)
        if not self.suite.together:
            work(number)
            return True
        print(self.job.cases[number], flush=True)
        try:
            work(number)
        except Exception as error:
            traceback.print_exc()
            self.found[number]["failure"] = reason(error)
        failed = "failure" in self.found[number]
        if self.job.size > 1 and any(hc.allgather_object(failed)):
            self.found[number].setdefault("failure", None)
            return False
        return not failed


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
    """What this rank finds of each case."""
    suite = find_suite(job.suite)
    if suite.measure:
        own: Any = import_named("function", suite.measure)
        return own(job) if suite.together else [own(job, case) for case in job.cases]
    bench = Bench(job)
    bench.run()
    return bench.found
