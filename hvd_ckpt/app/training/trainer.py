"""The training loop: steps, evaluations, snapshots, stop.

A run is a function of its configuration and its position in the data. So a run that resumes from a snapshot continues exactly like
the run that wrote it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvd_ckpt.app.training.build import Assembly, check_functions
from hvd_ckpt.app.training.callbacks import callbacks_of
from hvd_ckpt.app.training.config import Config, config_errors
from hvd_ckpt.app.training.ending import Reports, errors_everywhere
from hvd_ckpt.app.training.evaluation import evaluate
from hvd_ckpt.app.training.field_types import traced_steps
from hvd_ckpt.app.training.model import cut_into_stages, device_of, prepare_model
from hvd_ckpt.app.training.modes import Parts, distribute, mode_of
from hvd_ckpt.app.training.optim import Schedule, freeze, optimizer_of
from hvd_ckpt.app.training.plans import choose_plan
from hvd_ckpt.app.training.report import ProgressLines, Report, StepTrace
from hvd_ckpt.app.training.resume import SCHEMAS, Progress, ResumePoint, find_resume_point, read_snapshot
from hvd_ckpt.app.training.summary import print_summary
from hvd_ckpt.collectives.agreement import of_first_process
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler, batches_of_rank
from hvd_ckpt.distributed.averaging import AveragedWeights
from hvd_ckpt.distributed.precision import Precision
from hvd_ckpt.distributed.verification import verify
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated
from hvd_ckpt.parallel.tensor.recipes import tensor_parallel
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.processes.stopping import forget_file
from hvd_ckpt.reduction.broadcast import broadcast_parameters
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.lock import FolderLock
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.reader import HeldSnapshot, Snapshot
from hvd_ckpt.snapshots.snapshots import Snapshots
from hvd_ckpt.snapshots.training_state import seed_all, seed_of_rank
from hvd_ckpt.utils.spans import span

DEFAULT_STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        steps: taken, those before a resume included.
        evaluation: the last one, by names; empty without a validation split.
        ended_early: whether the evaluations stopped improving.
        folder: folder of logs, plan, pictures and snapshots.
        stopped: the name of the signal that stopped it, ``"stop"`` for the file of that name in the folder, or None.
    """

    steps: int
    evaluation: dict[str, float]
    ended_early: bool
    folder: Path
    stopped: str | None = None


class Trainer:
    """Trains a model over all ranks as configured. Collective: constructed and run on every rank.

    Args:
        config: settings of the run. Those of model and data have been used to build the other arguments.
        model: the model in training mode, on the CPU; it is moved to the device.
        objective: loss of the model. In pipeline stages :meth:`Objective.loss` gets the targets of a batch without its inputs.
        train, test: samples to train on and to evaluate on.
        point: start and folder of the run; by default as configured.

    Attributes:
        folder: folder of logs, plan, pictures and snapshots.
        model: on the device, with its plan; in pipeline stages this rank's part.
        optimizer: the ``DistributedOptimizer``, or that of ``LocalSGD``.
        mode: how the ranks share the work of a step.
        average: average of the weights, if configured.
        plan, plan_text: the plan for recomputation, and its file, or None.
        steps: number of steps of the whole run.
        schedule, progress: the learning rate, and how far the run has come.
        report, trace: what the run counts, shows and logs, and the trace of the configured steps.
        snapshots: snapshots of the run, and requests to stop it.
        reports: requests to stop and losses that are not finite, which single ranks report to all.

    Raises:
        ConfigError: a setting does not fit the model, a folder or snapshot cannot be used, or another run uses the folder; raised
            on every rank.
        DryRun: the configuration requests only the summary of the run.
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        train: Dataset,
        test: Dataset | None = None,
        point: ResumePoint | None = None,
    ) -> None:
        with errors_everywhere("hvd_ckpt.train.batch"):
            self.config = config.on_ranks(hvd.size())
        self.objective, self.train, self.test = objective, train, test
        self.model = model
        self._evaluation: dict[str, float] = {}
        self._prepare()
        with ExitStack() as undo:
            # Compared with a whole model and the optimizer of one rank, so read before these are distributed.
            snapshot, lock = self._find_start(point, undo)
            print_summary(self, snapshot)
            self.plan, self.plan_text = choose_plan(self, snapshot)
            self._distribute()
            # A folder must be empty to be given for a run, and that of a run that cannot start can be given again.
            with errors_everywhere("hvd_ckpt.train.config"):
                if current().number == 0:
                    config.write_yaml(self.folder / "config.yaml")
            self._load(snapshot, lock)
            undo.pop_all()  # from here on the folder is with the snapshots

    def _prepare(self) -> None:
        """Model and optimizer of one rank. The model is on its device, except where it is to be cut into stages."""
        config = self.config
        # Nothing in it communicates, so that a rank that fails can tell the others.
        with errors_everywhere("hvd_ckpt.train.settings"):
            if config.deterministic:
                use_deterministic_kernels()
            weights = None if config.verify.weights else False
            verify(recomputation=config.verify.recomputation, weights=weights)
            self.device = device_of(config)
            with config_errors(RuntimeError):
                self.precision = Precision(config.precision, self.device.type)
            self.sampler = DistributedSampler(
                self.train, config.batch, seed=config.seed, epochs=config.epochs
            )
            if self.test is not None and not len(self.test):
                raise ValueError(
                    "the data set to evaluate on has no samples: give some, or None instead of it"
                )
            self._callbacks = callbacks_of(config)
            if config.freeze is not None:
                freeze(self.model, config.freeze)
            self.model = prepare_model(self.model, config, self.device)
            self.optimizer = optimizer_of(config, self.model)
            check_functions(config, Assembly(self.model, self.objective, self.train, self.test))
        # Parts compare their models, so that this communicates.
        if config.tensor > 1:
            with config_errors():
                tensor_parallel(self.model)

    def _find_start(
        self, point: ResumePoint | None, undo: ExitStack
    ) -> tuple[Snapshot | None, FolderLock | None]:
        """The snapshot to resume from, whose weights rank 0 has loaded, or None; and, on the first process, the lock of the folder,
        which ``undo`` releases."""
        config, lock = self.config, None
        point = point or find_resume_point(config)
        self.folder = point.folder
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            if current().number == 0 and not config.dry_run:
                lock = FolderLock(point.folder)
                undo.callback(lock.release)
                if not isinstance(point.snapshot, HeldSnapshot):  # after a change of ranks the run goes on
                    forget_file(point.folder)
            snapshot = read_snapshot(point, config, len(self.train), self.model, self.optimizer)
            self.progress, self._first_ranks = Progress(), hvd.size()
            if snapshot is not None:
                self.progress = Progress(**snapshot.replicated["progress"])
                self._first_ranks = snapshot.replicated["ranks"]
            progress = self.progress
            left = self.sampler.batches_left(progress.position, config.samples_of_step(hvd.size()))
            self.steps = (config.steps or DEFAULT_STEPS) if left is None else progress.step + left
            if config.profile is not None and traced_steps(config.profile)[0] > self.steps:
                raise ValueError(f"profile {config.profile}: the run ends after step {self.steps}")
            # A step of replicas has as many samples on any number of ranks, and one of local SGD is one of each rank.
            scales = is_elastic() and config.replicas is None and config.local is None
            rate = config.lr * (hvd.size() / self._first_ranks if scales else 1.0)
            self.schedule = Schedule(config.schedule, rate, self.steps, config.warmup)
        return snapshot, lock

    def _distribute(self) -> None:
        """Stages, the weights of rank 0, and the optimizer of all ranks, whose hooks need the modules that the plan has changed."""
        config = self.config
        # The names of tied parameters, before the model is cut into stages.
        aliases = ModelTensors(self.model).aliases
        model = self.model
        if config.in_stages:
            model = cut_into_stages(self)
        elif self.plan is not None:
            self.plan.apply(model)
        broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = distribute(config, model, self.optimizer, aliases)
        self.model, self.optimizer = self.precision.prepare(model, optimizer)
        self.average = None
        if config.ema is not None:
            self.average = AveragedWeights(self.optimizer, multi_avg_fn=get_ema_multi_avg_fn(config.ema))
        self.mode = mode_of(config)(self)

    def _load(self, snapshot: Snapshot | None, lock: FolderLock | None) -> None:
        """The state of the snapshot: shards, moments and random states are known last. Nothing draws random numbers after it."""
        config, taken = self.config, self.progress.step
        seed_all(seed_of_rank(config.seed, taken))
        line = ProgressLines(self.steps, taken) if current().number == 0 else None
        self.report = Report(self, line, self._callbacks)
        self.trace = StepTrace(config.profile, self.folder, self.report)
        self.snapshots = Snapshots(
            self.folder,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.precision.scaler,
            average=self.average,
            keep=config.keep_snapshots,
            blocking=config.blocking_snapshots,
            warn=lambda text: self.report.say(f"Warning: {text}"),
        )
        self.snapshots.lock = lock
        if snapshot is not None:
            with config_errors():
                self.snapshots.load(snapshot)
                self.report.load_counts(snapshot.replicated["logged"])
        self.reports = Reports(config, self.snapshots.stop, self.report.say)

    # -------------------------------------------------------------------------------- the loop

    def run(self, after_step: Callable[[], None] | None = None) -> Outcome:
        """Trains to the end or until a request to stop, and writes a last snapshot. At the end of training it also evaluates.

        SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, unless the program handles them itself, and a file ``stop`` in the run's
        folder stop all ranks after the same step.

        Args:
            after_step: a function that is called after each step except the last, on every rank.

        Raises:
            FatalTrainingError: a loss is not finite, or the weights of ranks differ; raised on every rank.
            SnapshotError: the last snapshot cannot be written; raised on every rank. Earlier failures only give a warning.
        """
        config, progress = self.config, self.progress
        batches = batches_of_rank(
            self.train, self.sampler, config.batch, hvd.rank(), hvd.size(), progress.position, self.mode.parts
        )
        # Left in reverse: trace and snapshots warn through the report until they end.
        with closing(batches), self.report, self.trace, self.snapshots:
            with self.report.meter.excluded():
                self.report.tell("on_begin", self)
                # Trackers may keep the first process waiting. The others wait here, and not in their first step, which is timed.
                of_first_process(None, "hvd_ckpt.train.begun")
            if progress.pending_evaluation and self.test is not None:
                self._evaluate_and_report(due=True)
            while not self._finished():
                self.trace.before(progress.step + 1)
                with span("data"):
                    parts, position = next(batches)
                accumulated = self.step(parts)
                progress.step += 1
                progress.position = position
                units = sum(self.objective.units(batch) for batch, samples in parts if samples)
                self.report.add(progress.step, accumulated, units)
                self.trace.after(progress.step)
                self._do_what_is_due()
                if after_step is not None and not self._finished():
                    after_step()
            self.snapshots.wait()
            self._tell_of_snapshots()
            ended_early = progress.step < self.steps and self._has_stopped_improving()
            outcome = Outcome(progress.step, self._evaluation, ended_early, self.folder, self.reports.stopped)
            self.reports.acknowledge()
            self.report.tell("on_end", outcome)
        return outcome

    def _finished(self) -> bool:
        done = self.progress.step >= self.steps or self._has_stopped_improving()
        return done or self.reports.stopped is not None

    def step(self, parts: Parts) -> list[Accumulated]:
        """One optimizer step on this rank's parts of a global batch: one part, or one for each of its logical replicas.

        Returns:
            Loss and number of terms of each part. There are no terms if the step was skipped because a loss was not finite.

        Raises:
            NonFiniteLoss: a rank's loss is not finite, and ``on_nan`` is "stop"; raised on every rank.
        """
        config, mode = self.config, self.mode
        self.schedule.apply(self.optimizer, self.progress.step)
        self.optimizer.zero_grad()
        accumulated = mode.run(parts, mode.micro_batches(self.sampler, self.progress.position))

        # A rank that must tell the others something raises a flag, which travels with the gradients: no message of its own.
        #
        # float() waits for the forward pass of a GPU, so losses are looked at only if that has a consequence.
        losses = [float(loss) for loss, weight in accumulated if weight] if config.on_nan != "ignore" else []
        wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
        if current().on_any_stage(self.reports.has(wrong)):
            self.optimizer.notify()
        with span("wait", "reduce gradients"):
            self.optimizer.reduce_for_caller()
        skipped = self.optimizer.notified and self.reports.handle(wrong, self.progress.step + 1)
        mode.finish(parts, skipped)
        if skipped:
            self.snapshots.before_update()
            # With local SGD, a skipped step may still average, which changes the weights that a snapshot copies.
            mode.skip()
            return [Accumulated(torch.zeros((), dtype=torch.float32), 0.0) for _ in parts]

        # Gradients are reduced. Here clip() and step() only check that, and reduce nothing again.
        with span("update"), self.optimizer.skip_synchronize():
            if config.clip is not None:
                mode.clip(config.clip)
            # A snapshot is copied during the passes, which only read the weights; the update must wait for the copy.
            self.snapshots.before_update()
            mode.step(accumulated)
            if self.average is not None:
                self.average.update_parameters()
        return accumulated

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the validation split; the same on every rank. See :func:`~.evaluation.evaluate`."""
        with self.mode.evaluated():
            return evaluate(self)

    def state(self) -> SavedState:
        """All state that the run needs to resume, on each rank; see :meth:`Snapshots.commit`."""
        return self.snapshots.commit(*self._further_state())

    def _further_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state in a snapshot that only a run of this trainer has, and no loop of one's own. Collective."""
        replicated = {
            "config": self.config.as_dict(),
            "steps": self.steps,
            "ranks": self._first_ranks,
            "progress": self.progress.model_dump(),
            "plan": self.plan_text,
            "samples": len(self.train),
            "logged": self.report.counts(),
        }
        return replicated, {}

    # -------------------------------------------------------------------------------- within a run

    def _do_what_is_due(self) -> None:
        """The log, checks, an evaluation and a snapshot, where the last step was one for them."""
        config, progress = self.config, self.progress
        last = progress.step == self.steps
        if progress.step % config.log_every == 0 or last or progress.step == 1:
            self.report.log(progress.step, self.schedule.rate(progress.step - 1))
            self.reports.handle_waiting()
        if _due(config.verify.every, progress.step):
            verify(self.model)
        evaluation_due = _due(config.eval_every, progress.step)
        if self.test is not None and (last or evaluation_due):
            # A stop must not take long. The run that resumes evaluates first, and counts the result for patience as this one would.
            if self.reports.stopped and not last:
                progress.pending_evaluation = True
            else:
                self._evaluate_and_report(evaluation_due)
        # Last: the snapshot holds what the next entry of the log counts
        # and the evaluations so far, which a resumed run does not repeat.
        if self._finished() or _due(config.snapshot_every, progress.step):
            with self.report.meter.excluded():
                further = self._further_state()  # collective
                self.snapshots.begin(progress.step, lambda: further, SCHEMAS)
        self._tell_of_snapshots()

    def _evaluate_and_report(self, due: bool) -> None:
        """Only evaluations that are due count for patience: one at the end comes wherever the end is."""
        progress = self.progress
        progress.pending_evaluation = False
        with self.report.meter.excluded():
            start = time.perf_counter()
            means = self._evaluation = self.evaluate()
            self.report.evaluation(progress.step, means, time.perf_counter() - start)
        if due:
            progress.evaluated(means["loss"])

    def _tell_of_snapshots(self) -> None:
        while self.snapshots.written:
            self.report.tell("on_snapshot", self.snapshots.written.popleft())

    def _has_stopped_improving(self) -> bool:
        return self.config.patience is not None and self.progress.waited >= self.config.patience


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
