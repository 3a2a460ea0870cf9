"""The training loop: batches, micro-batches, the optimizer's step, and what is written down about them.

Everything that makes a run what it is follows from the configuration and the position in the data, so a run that goes on from a
snapshot does what the one that wrote it would have done.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.models.batch import Batch
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.precision import Precision
from hvd_ckpt.recompute import commit_batch_norm
from hvd_ckpt.reduction import (
    Compression,
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_ckpt.training import optimizers, snapshot
from hvd_ckpt.training.agreement import errors_everywhere, run_folder
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.data.dataset import Dataset
from hvd_ckpt.training.data.loader import Loader
from hvd_ckpt.training.data.stream import SampleStream
from hvd_ckpt.training.evaluation import evaluate
from hvd_ckpt.training.microbatch import Accumulated, accumulate
from hvd_ckpt.training.recomputing import in_segments, plan_of_run, with_batch_norm
from hvd_ckpt.training.report import Report
from hvd_ckpt.training.resuming import (
    Progress,
    check_resumed,
    later_snapshots,
    plan_text,
    remove_abandoned,
    with_options,
)
from hvd_ckpt.training.schedules import Schedule
from hvd_ckpt.training.snapshot import Snapshot

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
    """

    steps: int
    evaluation: dict[str, float]
    ended_early: bool
    folder: Path


class Trainer:
    """Trains a model over all ranks as a configuration says. Collective: made and run on every rank.

    Args:
        config: settings; those of model and data have been used by whoever built the other arguments.
        model: in training mode, on the CPU; it is moved to the device.
        objective: its loss.
        train, test: samples to train on and to evaluate on.

    Raises:
        ConfigError: a setting does not fit the model, or a folder or snapshot cannot be used; on every rank alike.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        train: Dataset,
        test: Dataset | None = None,
    ) -> None:
        self.config, self.objective, self.train, self.test = config, objective, train, test
        with errors_everywhere("hvd_ckpt.train.settings"):
            self.device = _device(config.device)
            self.stream = SampleStream(len(train), config.seed, config.epochs)
            self.precision = _precision(config, self.device)
            self.model = with_batch_norm(model.to(self.device), config.batch_norm)
            if config.segments is not None:
                self.model = in_segments(self.model, config.segments, config.reentrant)
            optimizer = optimizers.build(
                config.optimizer, self.model, config.lr, config.weight_decay, config.optimizer_options
            )
        self.folder, start = run_folder(config)
        resumed: Snapshot | None = None
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            if start is not None:
                resumed = snapshot.read(start, hvd.rank())
                check_resumed(config, len(train), resumed)
                self._load_weights(resumed.weights)
            self.progress = Progress(**resumed.common["progress"]) if resumed is not None else Progress()
            self.steps = self._steps()
            self.schedule = Schedule(config.schedule, config.lr, self.steps, config.warmup, config.final_lr)
        self._abandoned = later_snapshots(self.folder / "snapshots", self.progress.step) if resumed else []
        broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.plan, self._plan_text = plan_of_run(
            self.model, config, train, objective, self.device, self.folder, plan_text(config, resumed)
        )
        self._optimizer: Any = DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=getattr(Compression, config.compression),
            bucket_cap_mb=config.bucket_cap_mb,
        )
        self.model, self._optimizer = self.precision.prepare(self.model, self._optimizer)
        broadcast_optimizer_state(self._optimizer, root_rank=0)
        torch.manual_seed(_seed_of_rank(config.seed, self.progress.step))
        self.report = Report(self.folder, config, self.steps, objective.unit, self.progress.step, self.device)
        if resumed is not None:
            with errors_everywhere("hvd_ckpt.train.resume"):
                self._restore(resumed)

    @property
    def optimizer(self) -> Any:
        """The ``DistributedOptimizer``."""
        return self._optimizer

    def run(self) -> Outcome:
        """Trains to the end, evaluates, and writes a last snapshot."""
        config, progress = self.config, self.progress
        outcome = Outcome(progress.step, {}, self._waited_enough(), self.folder)
        with self._loader() as loader, self.report as report:
            while progress.step < self.steps and not outcome.ended_early:
                batch, samples = next(loader)
                accumulated = self.step(batch, samples)
                progress.step += 1
                progress.position = loader.position
                last = progress.step == self.steps
                report.add(progress.step, accumulated, self.objective.units(batch) if samples else 0)
                if progress.step % config.log_every == 0 or last:
                    report.log(progress.step, self.schedule.rate(progress.step - 1))
                due = _due(config.eval_every, progress.step)
                if self.test is not None and (last or due):
                    outcome = dataclasses.replace(outcome, evaluation=self._report_evaluation(due))
                    outcome = dataclasses.replace(outcome, ended_early=self._waited_enough() and not last)
                if last or outcome.ended_early or _due(config.snapshot_every, progress.step):
                    with report.apart():
                        self.snapshot()
        report.draw()
        return dataclasses.replace(outcome, steps=progress.step)

    def step(self, batch: Batch, samples: int) -> Accumulated:
        """One optimizer step on this rank's part of a batch.

        Args:
            samples: 0 if the batch is only there so that this rank takes part: it counts nothing.

        Returns:
            this rank's loss and the number of its terms
        """
        config = self.config
        self.schedule.apply(self._optimizer, self.progress.step)
        self._optimizer.zero_grad()
        accumulated = accumulate(
            self._loss,
            batch.to(self.device),
            self._micro_batches(),
            checkpoint=config.checkpoint,
            weight=self.objective.weight if samples else _nothing,
            across_ranks=True,
            backward=self._backward,
        )
        if config.batch_norm.startswith("deferred"):
            across_ranks = config.batch_norm == "deferred-ranks"
            commit_batch_norm(self.model, across_ranks=across_ranks, discard=not samples)
        if config.clip is not None:
            self.precision.unscale(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.precision.step(self._optimizer)
        return accumulated

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the held-out samples; the same on every rank."""
        assert self.test is not None
        return evaluate(
            self.model,
            self.test,
            self.objective,
            batch=self.config.micro_batch,
            batches=self.config.eval_batches,
            device=self.device,
            autocast=self.precision.autocast,
        )

    def snapshot(self) -> Path:
        """Writes everything that the run needs to go on; the newest ``keep_snapshots`` stay. Collective."""
        scaler = self.precision.scaler
        common = {
            "config": self.config.as_dict(),
            "steps": self.steps,
            "progress": dataclasses.asdict(self.progress),
            "optimizer": self._optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "plan": self._plan_text,
            "samples": len(self.train),
            "threads": torch.get_num_threads(),
        }
        own = {
            "random": snapshot.random_state(),
            "reduction": self._optimizer.reduction_state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "logged": self.report.open_entry(),
        }
        folder = self.folder / "snapshots"
        weights = self.model.state_dict()
        written = snapshot.write(folder, self.progress.step, weights=weights, common=common, own=own)
        if hvd.rank() == 0:
            remove_abandoned(self._abandoned, written)
            snapshot.prune(folder, self.config.keep_snapshots)
        return written

    # -------------------------------------------------------------------------------- within a run

    def _report_evaluation(self, due: bool) -> dict[str, float]:
        """Only evaluations that are due count for patience: one at the end comes wherever the end is."""
        progress = self.progress
        with self.report.apart():
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
        if self.config.batch_norm != "synchronized" or self.stream.length is None:
            return self.config.accumulate
        ranks: int = hvd.size()
        left = min(self.stream.length - self.progress.position, self.config.batch * ranks)
        return min(self.config.accumulate, max(left // ranks, 1))

    def _loss(self, batch: Batch) -> Tensor:
        with self.precision.autocast():
            return self.objective.loss(self.model(*batch.inputs, **batch.shared), batch)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.precision.backward(loss, self._optimizer, last)

    # -------------------------------------------------------------------------------- before the first step

    def _loader(self) -> Loader:
        return Loader(
            self.train,
            self.stream,
            self.config.batch,
            hvd.rank(),
            hvd.size(),
            self.progress.position,
        )

    def _steps(self) -> int:
        """Of the whole run: as configured, or what the stream's rest needs beyond those that were taken."""
        if self.stream.length is None:
            return self.config.steps or DEFAULT_STEPS
        left = max(self.stream.length - self.progress.position, 0)
        global_batch: int = self.config.batch * hvd.size()
        return self.progress.step + -(-left // global_batch)

    # -------------------------------------------------------------------------------- going on

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"resume {self.config.resume}: the snapshot is of another model: {reason}"
            ) from None

    def _restore(self, resumed: Snapshot) -> None:
        common, own = resumed.common, resumed.own
        options = [dict(group) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(common["optimizer"])
        with_options(self._optimizer, options)
        if self.precision.scaler is not None and common["scaler"] is not None:
            self.precision.scaler.load_state_dict(common["scaler"])
        if resumed.ranks != hvd.size() or own is None:
            return  # each rank draws anew, and learns anew when gradients are final
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in own["buffers"].items():
                buffers[name].copy_(value)
        self._optimizer.load_reduction_state_dict(own["reduction"])
        self.report.go_on(own["logged"])
        snapshot.set_random_state(own["random"])


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _nothing(batch: Batch) -> float:
    return 0.0


def _seed_of_rank(seed: int, step: int) -> int:
    """Ranks drop out different units; a run that goes on without its random state draws new ones."""
    rank: int = hvd.rank()
    return ((seed * 1_000_003 + step) * 100_003 + rank + 1) % 2**63


def _device(name: str | None) -> torch.device:
    if name is None:
        name = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N") from None
    if device.type == "cuda":
        number = hvd.local_rank() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise ConfigError(f"device '{name}': there is no such device here, see `hvd-ckpt doctor`")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N")
    return device


def _precision(config: Config, device: torch.device) -> Precision:
    try:
        return Precision(config.precision, device.type)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
