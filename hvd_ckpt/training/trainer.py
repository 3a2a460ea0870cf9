"""The training loop: batches, micro-batches, the optimizer's step, and what is written down about them.

Everything that makes a run what it is follows from the configuration and the position in the data, so a run that goes on from a
snapshot does what the one that wrote it would have done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import global_process_set
from torch import Tensor, nn

from hvd_ckpt.batchnorm import commit_batch_norm
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.sampler import Loader, Sampler
from hvd_ckpt.models.batch import Batch
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.reduction import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.reduction.consistency import check_equal_weights
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.sharding.clipping import clip_grad_norm_
from hvd_ckpt.snapshots.random_state import random_state, seed_all, seed_of_rank
from hvd_ckpt.snapshots.reader import Snapshot, SnapshotError
from hvd_ckpt.snapshots.resume import ranges_of, read_shards, state_of_shards
from hvd_ckpt.snapshots.shards import RunShards
from hvd_ckpt.snapshots.writer import SnapshotWriter
from hvd_ckpt.training import guards
from hvd_ckpt.training.agreement import errors_everywhere, run_folder
from hvd_ckpt.training.build import apply_plan, device_of, precision_of, prepare_model
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.evaluation import evaluate
from hvd_ckpt.training.guards import Notice
from hvd_ckpt.training.microbatch import Accumulated, accumulate
from hvd_ckpt.training.optim import Schedule, build_optimizer
from hvd_ckpt.training.report import Report, print_summary
from hvd_ckpt.training.resume import (
    Progress,
    average_state,
    average_weights,
    check_fits,
    check_resumed,
    check_state,
    later_snapshots,
    load_average,
    load_optimizer,
    load_rank_state,
    load_weights,
    plan_text,
    remove_abandoned,
)
from hvd_ckpt.training.resume_point import ResumePoint
from hvd_ckpt.training.sharded import check_job, distributed
from hvd_ckpt.training.stopping import StopRequest

__all__ = ["Outcome", "Trainer"]

DEFAULT_STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        steps: that were taken, those before a resume included.
        evaluation: the last one, by names; empty if nothing is held out.
        ended_early: whether the evaluations stopped getting better.
        folder: where logs, plan, pictures and snapshots are.
        stopped: the name of the signal that stopped it, ``"stop"`` for the file of that name in the folder, or None.
    """

    steps: int
    evaluation: dict[str, float]
    ended_early: bool
    folder: Path
    stopped: str | None = None


class Trainer:
    """Trains a model over all ranks as a configuration says. Collective: made and run on every rank.

    Args:
        config: settings; those of model and data have been used by whoever built the other arguments.
        model: in training mode, on the CPU; it is moved to the device.
        objective: its loss.
        train, test: samples to train on and to evaluate on.
        origin: where the run starts, and its folder; by default as the configuration says.

    Attributes:
        rate_scale: what the configured learning rate is multiplied by: 1, but in an elastic job the number of ranks over that with
            which the run began.

    Raises:
        ConfigError: a setting does not fit the model, or a folder or snapshot cannot be used; on every rank alike.
        DryRun: the configuration asks for no more than to be told what the run is about to do.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        train: Dataset,
        test: Dataset | None = None,
        origin: ResumePoint | None = None,
    ) -> None:
        self.config, self.objective, self.train, self.test = config, objective, train, test
        with errors_everywhere("hvd_ckpt.train.settings"):
            check_job(config)
            self.device = device_of(config)
            self.sampler = Sampler(len(train), config.seed, config.epochs)
            self.precision = precision_of(config, self.device)
            self.model = prepare_model(model, config, self.device)
            optimizer = build_optimizer(
                config.optimizer, self.model, config.lr, config.weight_decay, config.optimizer_options
            )
        self._stop = StopRequest(None)
        self._stopped: str | None = None
        self._asked: str | None = None
        self._writer: SnapshotWriter | None = None
        origin = origin or ResumePoint(*run_folder(config))
        self.folder = origin.folder
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            resumed = origin.read()
            if resumed is not None:
                check_state(resumed)
                check_resumed(config, len(train), resumed)
                check_fits(resumed, self.model, optimizer)
                load_weights(self.model, resumed.weights, config.resume)
            kept = {} if resumed is None else state_of_shards(optimizer, self.model)
            self.progress = Progress(**resumed.replicated["progress"]) if resumed is not None else Progress()
            self.steps = self._steps()
            self._first_ranks: int = hvd.size() if resumed is None else resumed.replicated["ranks"]
            self.rate_scale = hvd.size() / self._first_ranks if is_elastic() else 1.0
            rate = config.lr * self.rate_scale
            self.schedule = Schedule(config.schedule, rate, self.steps, config.warmup)
            if hvd.rank() == 0 and not config.dry_run:
                config.write_yaml(self.folder / "config.yaml")
        taken = self.progress.step
        print_summary(config, self.model, objective, train, test, self.folder, self.device, taken, self.steps)
        self._abandoned = later_snapshots(self.folder / "snapshots", self.progress.step) if resumed else []
        broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.plan, self._plan_text = apply_plan(
            self.model, config, train, objective, self.device, self.folder, plan_text(config, resumed)
        )
        self._shards = RunShards(self.model, config.stage, lossy=config.wire != "fp32")
        self._optimizer: Any = distributed(optimizer, self.model, config)
        if is_elastic():  # where ranks have made different numbers of optimizers
            self._optimizer.agree_on_naming()
        self.model, self._optimizer = self.precision.prepare(self.model, self._optimizer)
        if not config.stage:
            broadcast_optimizer_state(self._optimizer, root_rank=0)
        seed_all(seed_of_rank(config.seed, self.progress.step))
        self.report = Report(self.folder, config, self.steps, objective.unit, taken, self.device, self.plan)
        self._average = average_weights(self._optimizer, config.ema)
        if resumed is not None:
            self._go_on_from(resumed, kept)

    @property
    def optimizer(self) -> Any:
        """The ``DistributedOptimizer``."""
        return self._optimizer

    @property
    def asked_to_stop(self) -> str | None:
        """Who has asked this rank to stop, as in ``Outcome.stopped``; where it is set, :meth:`run` begins with that request."""
        return self._stop.reason or self._asked

    @asked_to_stop.setter
    def asked_to_stop(self, reason: str | None) -> None:
        self._asked = reason

    def run(self, after_step: Callable[[], None] | None = None) -> Outcome:
        """Trains to the end, evaluates, and writes a last snapshot; or until it is asked to stop, and writes one there.

        SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, unless the program handles them itself, and a file ``stop`` in the run's
        folder stop all ranks after the same step.

        Args:
            after_step: is called after each step but the last, on every rank.

        Raises:
            CannotGoOn: a loss is not finite, or ranks' weights differ; on every rank.
            SnapshotError: the last snapshot could not be written; on every rank. Earlier ones are a warning.
        """
        config, progress = self.config, self.progress
        outcome = Outcome(progress.step, {}, False, self.folder)
        with self._loader() as loader, self._tools() as report:
            if progress.pending_evaluation and self.test is not None:
                outcome = dataclasses.replace(outcome, evaluation=self._report_evaluation(True))
            outcome = dataclasses.replace(outcome, ended_early=self._waited_enough())
            while progress.step < self.steps and not (outcome.ended_early or self._stops()):
                batch, samples = next(loader)
                accumulated = self.step(batch, samples)
                progress.step += 1
                progress.position = loader.position
                last = progress.step == self.steps
                report.add(progress.step, accumulated, self.objective.units(batch) if samples else 0)
                if progress.step % config.log_every == 0 or last or progress.step == 1:
                    report.log(progress.step, self.schedule.rate(progress.step - 1))
                if _due(config.check_weights, progress.step):
                    check_equal_weights(self.model)
                due = _due(config.eval_every, progress.step)
                if self.test is not None and (last or due):
                    if self._stops() and not last:  # whoever stops a run waits for its end
                        progress.pending_evaluation = True
                    else:
                        outcome = dataclasses.replace(outcome, evaluation=self._report_evaluation(due))
                        outcome = dataclasses.replace(outcome, ended_early=self._waited_enough() and not last)
                ends = last or outcome.ended_early or self._stops()
                if ends or _due(config.snapshot_every, progress.step):
                    with report.excluded():
                        self._begin_snapshot()
                if after_step is not None and not ends:
                    after_step()
            self._finish_snapshot()
        if not self._stops():  # the launcher may give little time, and who goes on draws at the end
            report.draw()
        return dataclasses.replace(outcome, steps=progress.step, stopped=self._stopped)

    def step(self, batch: Batch, samples: int) -> Accumulated:
        """One optimizer step on this rank's part of a batch.

        Args:
            samples: 0 if the batch is only there so that this rank takes part: it counts nothing.

        Returns:
            this rank's loss and the number of its terms; no terms if the step was skipped, because a loss was not finite

        Raises:
            CannotGoOn: a rank's loss is not finite, and the configuration says to stop then; on every rank.
        """
        config = self.config
        self.schedule.apply(self._optimizer, self.progress.step)
        self._optimizer.zero_grad()
        before = [buffer.clone() for buffer in self.model.buffers()] if config.on_nan == "skip" else []
        accumulated = accumulate(
            self._loss,
            batch.to(self.device),
            self._micro_batches(),
            checkpoint=config.checkpoint,
            weight=self.objective.weight if samples else _nothing,
            across_ranks=True,
            backward=self._backward,
        )
        finite = config.on_nan == "ignore" or not accumulated.weight or guards.is_finite(accumulated.loss)
        if not finite or self._stop.reason is not None:
            self._optimizer.notify()
        self._optimizer.reduce_once()
        skipped = False
        if self._optimizer.notified:
            skipped = self._heed(None if finite else float(accumulated.loss))
        if config.batch_norm.startswith("deferred"):
            across_ranks = config.batch_norm == "deferred-ranks"
            commit_batch_norm(self.model, across_ranks=across_ranks, discard=skipped or not samples)
        if skipped:
            with torch.no_grad():
                for buffer, kept in zip(self.model.buffers(), before):
                    buffer.copy_(kept)
            return Accumulated(torch.zeros(()), 0.0)
        if config.clip is not None:
            self.precision.unscale(self._optimizer)
            clip_grad_norm_(self.model.parameters(), config.clip)
        if self._writer is not None:
            self._writer.check()
            self._writer.before_update()
        self.precision.step(self._optimizer)
        if self._average is not None:
            self._average.update_parameters()
        return accumulated

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the held-out samples; the same on every rank.

        With ``ema``, those of the averaged weights as well, under names that begin with ``ema_``.
        """
        means = self._evaluate()
        if self._average is not None:
            with self._average.applied():
                averaged = self._evaluate()
            means.update({f"ema_{name}": averaged[name] for name in averaged if name != "samples"})
        return means

    def _evaluate(self) -> dict[str, float]:
        assert self.test is not None
        return evaluate(
            self.model,
            self.test,
            self.objective,
            batch=self.config.micro_batch,
            batches=self.config.eval_batches,
            device=self.device,
            autocast=self.precision.autocast,
            in_step=self.config.stage == 3,
        )

    def state(self) -> dict[str, Any]:
        """The state that the run needs to resume, as the arguments of :meth:`SnapshotWriter.begin`; tensors are not copied."""
        scaler = self.precision.scaler
        average, average_shard = average_state(self._average, self.config.stage > 0)
        replicated = {
            "config": self.config.as_dict(),
            "steps": self.steps,
            "ranks": self._first_ranks,
            "progress": self.progress.model_dump(),
            "optimizer": None if self.config.stage else self._optimizer.state_dict(),
            "ema": average,
            "scaler": None if scaler is None else scaler.state_dict(),
            "plan": self._plan_text,
            "samples": len(self.train),
            "threads": torch.get_num_threads(),
        }
        per_rank = {
            "random": random_state(),
            "reduction": self._optimizer.reduction_state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "logged": self.report.open_entry(),
        }
        return {
            "weights": self._shards.weights(self.model),
            "replicated": replicated,
            "per_rank": per_rank,
            "shard": self._shards.state(self._optimizer, average_shard),
        }

    # -------------------------------------------------------------------------------- within a run

    @contextlib.contextmanager
    def _tools(self) -> Iterator[Report]:
        """Logs, a writer of snapshots, and ears for requests to stop; open as long as the run is."""
        token = broadcast_from(secrets.token_hex(4), 0, global_process_set, "hvd_ckpt.train.token")
        self._stopped = None
        with (
            self.report,
            StopRequest(self.folder if hvd.rank() == 0 else None, self._asked) as self._stop,
            SnapshotWriter(
                self.folder / "snapshots",
                self.config.keep_snapshots,
                token,
                hvd.rank(),
                hvd.size(),
                lambda text: self.report.say(f"Warning: {text}"),
                blocking=self.config.blocking_snapshots
                or self.config.offload is not None,  # a copy would have no room
                written=lambda path, warn: remove_abandoned(self._abandoned, path, warn),
            ) as self._writer,
        ):
            yield self.report
            if self._stops():
                self._stop.met()
        self._writer = None

    def _stops(self) -> bool:
        return self._stopped is not None

    def _heed(self, loss: float | None) -> bool:
        """What ranks have to say; whether this step is to be skipped. Collective."""
        notices = guards.gather(Notice.of(self._stop.reason, loss, self.progress.step + 1))
        self._stopped = guards.stop_reason(notices)
        fault = guards.loss_fault(notices)
        if fault is None:
            return False
        if self.config.on_nan == "stop":
            raise guards.NonFiniteLoss(f"{fault}: lower the learning rate, or give --on-nan skip")
        self.report.say(f"Warning: {fault}: the step is skipped.")
        return True

    def _begin_snapshot(self) -> None:
        assert self._writer is not None
        changing = {name for name, _ in self.model.named_buffers()}
        self._writer.begin(self.progress.step, **self.state(), changing=changing)

    def _finish_snapshot(self) -> None:
        """Waits for the last snapshot. Collective.

        Raises:
            SnapshotError: it was not written.
        """
        assert self._writer is not None
        self._writer.wait()
        fault = broadcast_from(self._writer.failed, 0, global_process_set, "hvd_ckpt.train.written")
        if fault is not None:
            raise SnapshotError(
                f"The last snapshot, of step {self.progress.step}, could not be written: {fault}"
            )

    def _report_evaluation(self, due: bool) -> dict[str, float]:
        """Only evaluations that are due count for patience: one at the end comes wherever the end is."""
        progress = self.progress
        progress.pending_evaluation = False
        with self.report.excluded():
            start = time.perf_counter()
            means = self.evaluate()
            self.report.evaluation(progress.step, means, time.perf_counter() - start)
        if due and means["loss"] < (math.inf if progress.best is None else progress.best):
            progress.best, progress.waited = means["loss"], 0
        elif due:
            progress.waited += 1
        return means

    def _waited_enough(self) -> bool:
        return self.config.patience is not None and self.progress.waited >= self.config.patience

    def _micro_batches(self) -> int:
        """As many on every rank where each of them communicates: no more than the smallest part of a short batch has samples."""
        communicates = self.config.batch_norm == "synchronized" or self.config.stage == 3
        if not communicates or self.sampler.length is None:
            return self.config.accumulate
        ranks: int = hvd.size()
        left = min(self.sampler.length - self.progress.position, self.config.batch * ranks)
        return min(self.config.accumulate, max(left // ranks, 1))

    def _loss(self, batch: Batch) -> Tensor:
        with self.precision.autocast():
            return self.objective.loss(self.model(*batch.inputs, **batch.shared), batch)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.precision.backward(loss, self._optimizer, last)

    # -------------------------------------------------------------------------------- before the first step

    def _go_on_from(self, resumed: Snapshot, kept: dict[str, dict[str, Any]]) -> None:
        """Takes up all but the weights. Collective.

        Args:
            kept: what the optimizer keeps of pieces of parameters.
        """
        parts = None
        with errors_everywhere("hvd_ckpt.train.parts"):
            if resumed.sharding is not None:
                ranges = ranges_of(self._optimizer, self.model)
                parts = read_shards(resumed, ranges, kept, len(self._optimizer.param_groups))
        load_optimizer(resumed, parts, self._optimizer)
        self._shards.broadcast_weights(self._optimizer)
        if self._average is not None:
            load_average(self._average, resumed.replicated, parts)
        with errors_everywhere("hvd_ckpt.train.resume"):
            load_rank_state(resumed, self.model, self._optimizer, self.precision.scaler, self.report)

    def _loader(self) -> Loader:
        return Loader(
            self.train,
            self.sampler,
            self.config.batch,
            hvd.rank(),
            hvd.size(),
            self.progress.position,
        )

    def _steps(self) -> int:
        """Of the whole run: as configured, or what the stream's rest needs beyond those that were taken."""
        if self.sampler.length is None:
            return self.config.steps or DEFAULT_STEPS
        left = max(self.sampler.length - self.progress.position, 0)
        global_batch: int = self.config.batch * hvd.size()
        return self.progress.step + -(-left // global_batch)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _nothing(batch: Batch) -> float:
    return 0.0
