"""The training loop: start or resume, steps, evaluations, snapshots, stop.

A run is a function of its configuration and its position in the data, so a run that resumes from a snapshot does what the one that
wrote it would have done.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.app.training.callbacks import callbacks_of
from hvd_ckpt.app.training.config import Config, first_and_last
from hvd_ckpt.app.training.ending import Reports, check_weights, config_errors, errors_everywhere
from hvd_ckpt.app.training.evaluation import evaluate
from hvd_ckpt.app.training.optim import Schedule, build_optimizer, freeze
from hvd_ckpt.app.training.own import Stream, check_functions
from hvd_ckpt.app.training.passes import Parts, Passes, micro_batches_of, parts_of_rank
from hvd_ckpt.app.training.prepare import (
    choose_plan,
    cut_into_stages,
    device_of,
    distribute,
    precision_of,
    prepare_model,
)
from hvd_ckpt.app.training.profiling import StepTrace, utilization_of_a_unit
from hvd_ckpt.app.training.report import Report
from hvd_ckpt.app.training.resume import (
    Progress,
    ResumePoint,
    average_weights,
    find_resume_point,
    plan_text,
    read_snapshot,
    replica_entries,
)
from hvd_ckpt.app.training.summary import print_summary
from hvd_ckpt.app.training.trained import Start, trained_on_text
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler, Loader
from hvd_ckpt.pipeline.microbatch import Accumulated
from hvd_ckpt.pipeline.pipeline import Pipeline
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction import broadcast_optimizer_state, broadcast_parameters
from hvd_ckpt.reduction.agreement import of_first_process
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.snapshots.content import tensors_of
from hvd_ckpt.snapshots.random_state import seed_all, seed_of_rank
from hvd_ckpt.snapshots.resume import state_of_shards
from hvd_ckpt.snapshots.snapshots import Snapshots
from hvd_ckpt.tensor.recipes import tensor_parallel
from hvd_ckpt.utils.spans import span

DEFAULT_STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        steps: taken, those before a resume included.
        evaluation: the last one, by names; empty without a validation split.
        ended_early: whether the evaluations stopped improving.
        folder: of logs, plan, pictures and snapshots.
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
        config: settings; those of model and data have been used to build the other arguments.
        model: in training mode, on the CPU; it is moved to the device.
        objective: its loss. In pipeline stages :meth:`Objective.loss` gets the targets of a batch without its inputs.
        train, test: samples to train on and to evaluate on.
        point: where the run starts, and its folder; by default as configured.

    Attributes:
        optimizer: the ``DistributedOptimizer``, or that of ``LocalSGD``.
        plan: that recomputation follows, or None.
        rate_scale: factor of the configured learning rate: 1, but in an elastic job the number of ranks over that at the start.
        requested_stop: a request to stop that :meth:`run` begins with, as in ``Outcome.stopped``.

    Raises:
        ConfigError: a setting does not fit the model, or a folder or snapshot cannot be used; on every rank alike.
        DryRun: the configuration asks for the summary of the run alone.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        train: Dataset,
        test: Dataset | None = None,
        point: ResumePoint | None = None,
    ) -> None:
        self.config, self.objective, self.train, self.test = config, objective, train, test
        self._evaluation: dict[str, float] = {}

        # Model and optimizer of one rank
        with errors_everywhere("hvd_ckpt.train.settings"):
            if config.deterministic:
                use_deterministic_kernels()
            self.device = device_of(config)
            self.sampler = DistributedSampler(
                train,
                config.batch,
                seed=config.seed,
                epochs=config.epochs,
                shuffle=not isinstance(train, Stream),
            )
            self.precision = precision_of(config, self.device)
            callbacks = callbacks_of(config)
            self._prompt = None if config.prompt is None else Start(trained_on_text(config), config.prompt)
            if config.freeze is not None:
                freeze(model, config.freeze)
            self.model = prepare_model(model, config, self.device)
            optimizer = build_optimizer(
                config.optimizer,
                self.model,
                config.lr,
                config.weight_decay,
                config.optimizer_options,
                config.layer_decay,
            )
            check_functions(config, self.model, objective, train, self.device)

        if config.tensor > 1:
            with config_errors():
                tensor_parallel(self.model)

        # Snapshot: read, validated, and its weights loaded
        point = point or find_resume_point(config)
        self.folder = point.folder
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            snapshot = read_snapshot(point, config, len(train), self.model, optimizer)
            self.progress = Progress() if snapshot is None else Progress(**snapshot.replicated["progress"])
            self._first_ranks: int = hvd.size() if snapshot is None else snapshot.replicated["ranks"]
            global_batch = config.batch * (config.replicas or hvd.size())
            left = self.sampler.batches_left(self.progress.position, global_batch)
            self.steps = (config.steps or DEFAULT_STEPS) if left is None else self.progress.step + left
            if config.profile is not None and first_and_last(config.profile)[0] > self.steps:
                raise ValueError(f"profile {config.profile}: the run ends after step {self.steps}")
            scales = is_elastic() and config.replicas is None and not config.is_local
            self.rate_scale = hvd.size() / self._first_ranks if scales else 1.0
            self.schedule = Schedule(config.schedule, config.lr * self.rate_scale, self.steps, config.warmup)
            if current().number == 0 and not config.dry_run:
                config.write_yaml(self.folder / "config.yaml")
        taken = self.progress.step
        expected = {} if snapshot is None else state_of_shards(optimizer, self.model)
        print_summary(config, self.model, objective, train, test, self.folder, self.device, taken, self.steps)

        # Plan and count of operations, which see the whole model; stages; weights of rank 0
        utilization = utilization_of_a_unit(config, self.model, objective, train, self.device)
        _, aliases = tensors_of(self.model, buffers=False)
        self.plan, self._plan_text = choose_plan(
            self.model,
            optimizer,
            config,
            train,
            objective,
            self.device,
            self.folder,
            plan_text(config, snapshot),
        )
        if config.stages > 1:
            self.model = cut_into_stages(self.model, optimizer, config, self.device, self.plan)
            self.model.recorder = lambda kind, chunk, part: span(
                kind, f"{kind} chunk {chunk}, micro-batch {part}"
            )
        elif self.plan is not None:
            self.plan.apply(self.model)
        broadcast_parameters(self.model.state_dict(), root_rank=0)

        # Optimizer of all ranks
        self.optimizer: Any
        self.model, self.optimizer = self.precision.prepare(
            self.model, distribute(optimizer, self.model, config, aliases)
        )
        if not config.shard_stage and not config.is_local:
            broadcast_optimizer_state(self.optimizer, root_rank=0)
        self._average = average_weights(self.optimizer, config.ema)
        self._passes = Passes(config, self.model, self.optimizer, objective, self.precision, self.device)

        # State of the snapshot
        seed_all(seed_of_rank(config.seed, taken))
        self.report = Report(
            self.folder,
            config,
            self.steps,
            objective.unit,
            taken,
            self.device,
            self.plan,
            utilization,
            callbacks,
        )
        self._trace = StepTrace(config.profile, self.folder, self.report)
        self.snapshots = Snapshots(
            self.folder,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.precision.scaler,
            average=self._average,
            keep=config.keep_snapshots,
            blocking=config.blocking_snapshots,
            warn=lambda text: self.report.say(f"Warning: {text}"),
        )
        self._reports = Reports(config, self.snapshots.stop, self.report.say)
        if snapshot is not None:
            with config_errors():
                if self.snapshots.load(snapshot, expected):
                    self.report.meter.load_pending(snapshot.per_rank["logged"])
                if self.optimizer.replicas is not None:
                    entries = snapshot.replicated["replicas"]["logged"]
                    self.report.meter.load_pending(
                        [entries[index] for index in self.optimizer.replicas.indices]
                    )

    @property
    def requested_stop(self) -> str | None:
        return self.snapshots.stop.reason

    @requested_stop.setter
    def requested_stop(self, reason: str | None) -> None:
        self.snapshots.stop.reason = reason

    # -------------------------------------------------------------------------------- the loop

    def run(self, after_step: Callable[[], None] | None = None) -> Outcome:
        """Trains to the end, evaluates, and writes a last snapshot; or until a request to stop, and writes one there.

        SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, unless the program handles them itself, and a file ``stop`` in the run's
        folder stop all ranks after the same step.

        Args:
            after_step: is called after each step but the last, on every rank.

        Raises:
            FatalTrainingError: a loss is not finite, or ranks' weights differ; on every rank.
            SnapshotError: the last snapshot could not be written; on every rank. Earlier ones are a warning.
        """
        config, progress, own = self.config, self.progress, parts_of_rank(self.config)
        if isinstance(self.train, Stream):
            self.train.seek(progress.epoch, progress.epoch_start)
        loader = Loader(
            self.train, self.sampler, config.batch, hvd.rank(), hvd.size(), progress.position, own
        )
        with loader, self.report, self._trace, self.snapshots:
            with self.report.meter.excluded():
                self.report.tell("on_begin", self)
                of_first_process(None, "hvd_ckpt.train.begun")  # which trackers may keep waiting
            if progress.pending_evaluation and self.test is not None:
                self._evaluate_and_report(due=True)
            while not self._finished():
                self._trace.before(progress.step + 1)
                with span("data"):
                    parts = [next(loader) for _ in range(own)]
                accumulated = self.step(parts)
                progress.step += 1
                progress.position = loader.position
                if isinstance(self.train, Stream):  # all ranks have read what the first has
                    first = progress.position - own * hvd.size()
                    progress.epoch, progress.epoch_start = self.train.pass_of(first)
                last = progress.step == self.steps
                units = sum(self.objective.units(batch) for batch, samples in parts if samples)
                self.report.add(progress.step, accumulated, units)
                self._trace.after(progress.step)
                if progress.step % config.log_every == 0 or last or progress.step == 1:
                    self._log()
                if _due(config.check_weights, progress.step):
                    check_weights(self.model)
                due = _due(config.eval_every, progress.step)
                if self.test is not None and (last or due):
                    if self._reports.stopped and not last:  # a stop must not take long
                        progress.pending_evaluation = True
                    else:
                        self._evaluate_and_report(due)
                if self._finished() or _due(config.snapshot_every, progress.step):
                    with self.report.meter.excluded():
                        self.snapshots.begin(progress.step, **self._further_state())
                self._tell_of_snapshots()
                if after_step is not None and not self._finished():
                    after_step()
            self.snapshots.wait()
            self._tell_of_snapshots()
            ended_early = progress.step < self.steps and self._has_stopped_improving()
            outcome = Outcome(
                progress.step, self._evaluation, ended_early, self.folder, self._reports.stopped
            )
            self._reports.acknowledge()
            self.report.tell("on_end", outcome)
        if not outcome.stopped:  # the launcher may leave little time, and a resumed run draws at its end
            self.report.draw()
        return outcome

    def _finished(self) -> bool:
        done = self.progress.step >= self.steps or self._has_stopped_improving()
        return done or self._reports.stopped is not None

    def step(self, parts: Parts) -> list[Accumulated]:
        """One optimizer step on this rank's parts of a global batch: one, or that of each of its logical replicas.

        Returns:
            of each part the loss and the number of its terms; no terms if the step was skipped, because a loss was not finite

        Raises:
            NonFiniteLoss: a rank's loss is not finite, and ``on_nan`` is "stop"; on every rank.
        """
        config = self.config
        self.schedule.apply(self.optimizer, self.progress.step)
        self.optimizer.zero_grad()
        micro_batches = micro_batches_of(config, self.sampler, self.progress.position)
        accumulated = self._passes.run(parts, micro_batches)
        losses = [float(loss) for loss, weight in accumulated if weight] if config.on_nan != "ignore" else []
        wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
        if current().on_any_stage(self._reports.has(wrong)):
            self.optimizer.notify()
        with span("wait", "reduce gradients"):
            self.optimizer.reduce_for_caller()
        skipped = self.optimizer.notified and self._reports.handle(wrong, self.progress.step + 1)
        self._passes.finish(parts, skipped)
        if skipped:
            accumulated = [Accumulated(torch.zeros((), dtype=torch.float32), 0.0) for _ in parts]
            if not config.is_local:
                return accumulated
        with span("update"), self.optimizer.skip_synchronize():
            if config.clip is not None and not skipped and not self._passes.idle:
                self._passes.clip(config.clip)
            self.snapshots.before_update()
            self._passes.step(accumulated, skipped)
            if self._average is not None:
                self._average.update_parameters()
        return accumulated

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the validation split; the same on every rank. See :func:`~.evaluation.evaluate`."""
        assert self.test is not None
        if isinstance(self.model, Pipeline):
            self.model.micro_batches = 1  # batches are as small, and follow one another through the stages
        if self.config.replicas is not None:
            self.optimizer.replicas.average_buffers()
        with self._evaluated_weights():
            return evaluate(
                self.model,
                self.test,
                self.objective,
                batch=self.config.micro_batch,
                batches=self.config.eval_batches,
                device=self.device,
                autocast=self.precision.autocast,
                in_step=self.config.shard_stage == 3,
                average=self._average,
                parts=parts_of_rank(self.config),
            )

    def sample(self) -> str:
        """The configured prompt with what the model makes of it, the same on every rank; see :meth:`~.trained.Start.sample`."""
        assert self._prompt is not None
        with self._evaluated_weights(), self.precision.autocast():
            return self._prompt.sample(self.model, self.config.seed)

    def _evaluated_weights(self) -> contextlib.AbstractContextManager[Any]:
        return self.optimizer.averaged() if self.config.is_local else contextlib.nullcontext()

    def state(self) -> dict[str, Any]:
        """The state that the run needs to resume, see :meth:`Snapshots.contents`.

        Collective with replicas, whose buffers the ranks gather.
        """
        return self.snapshots.contents(**self._further_state())

    def _further_state(self) -> dict[str, dict[str, Any]]:
        """What a snapshot of a run has besides that of any loop."""
        logged = self.report.meter.pending()
        replicated = {
            "config": self.config.as_dict(),
            "steps": self.steps,
            "ranks": self._first_ranks,
            "progress": self.progress.model_dump(),
            "plan": self._plan_text,
            "samples": len(self.train),
        }
        if self.optimizer.replicas is not None:
            replicated["replicas"] = {
                **self.optimizer.replicas.state_dict(),
                "logged": replica_entries(logged),
            }
        return {"replicated": replicated, "per_rank": {"logged": logged}}

    # -------------------------------------------------------------------------------- within a run

    def _log(self) -> None:
        step = self.progress.step
        more = {"divergence": self.optimizer.divergence} if self.config.is_local else {}
        self.report.log(step, self.schedule.rate(step - 1), **more)
        self._reports.handle_waiting()

    def _evaluate_and_report(self, due: bool) -> None:
        """Only evaluations that are due count for patience: one at the end comes wherever the end is."""
        progress = self.progress
        progress.pending_evaluation = False
        with self.report.meter.excluded():
            start = time.perf_counter()
            means = self._evaluation = self.evaluate()
            sample = {} if self._prompt is None else {"sample": self.sample()}
            self.report.evaluation(progress.step, means, time.perf_counter() - start, **sample)
        if due:
            progress.evaluated(means["loss"])

    def _tell_of_snapshots(self) -> None:
        while self.snapshots.written:
            self.report.tell("on_snapshot", self.snapshots.written.popleft())

    def _has_stopped_improving(self) -> bool:
        return self.config.patience is not None and self.progress.waited >= self.config.patience


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
