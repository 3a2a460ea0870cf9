"""The training loop: batches, micro-batches, the optimizer's step, and what is written down about them.

Everything that makes a run what it is follows from the configuration and the position in the data, so a run that goes on from a
snapshot does what the one that wrote it would have done.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.models.batch import Batch
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.planning import BudgetError, Plan
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
from hvd_ckpt.training.recomputing import in_segments, load_plan, make_plan, with_batch_norm
from hvd_ckpt.training.report import Report
from hvd_ckpt.training.schedules import Schedule
from hvd_ckpt.training.snapshot import Snapshot

__all__ = ["Outcome", "Trainer"]

DEFAULT_STEPS = 100
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: optimizer steps taken.
        position: samples of the stream that are used up.
        best: the lowest loss of an evaluation.
        waited: evaluations since then.
    """

    step: int = 0
    position: int = 0
    best: float | None = None
    waited: int = 0


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
        self.device = _device(config.device)
        self.progress = Progress()
        with errors_everywhere("hvd_ckpt.train.settings"):
            self.stream = SampleStream(len(train), config.seed, config.epochs)
            global_batch = config.batch * hvd.size()
            self.steps = config.steps or DEFAULT_STEPS
            if self.stream.length is not None:
                self.steps = -(-self.stream.length // global_batch)
            self.schedule = Schedule(config.schedule, config.lr, self.steps, config.warmup, config.final_lr)
            self.precision = _precision(config, self.device)
            self.model = with_batch_norm(model.to(self.device), config.batch_norm)
            if config.segments is not None:
                self.model = in_segments(self.model, config.segments, config.reentrant)
            optimizer = optimizers.build(
                config.optimizer, self.model, config.lr, config.weight_decay, config.optimizer_options
            )
        self.folder, start = run_folder(config)
        resumed = None
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            if start is not None:
                resumed = snapshot.read(start, hvd.rank())
                self._load_weights(resumed.weights)
        broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.plan = self._plan(resumed)
        self._optimizer: Any = DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=getattr(Compression, config.compression),
            bucket_cap_mb=config.bucket_cap_mb,
        )
        self.model, self._optimizer = self.precision.prepare(self.model, self._optimizer)
        broadcast_optimizer_state(self._optimizer, root_rank=0)
        torch.manual_seed(_seed_of_rank(config.seed, self.progress.step))
        if resumed is not None:
            with errors_everywhere("hvd_ckpt.train.resume"):
                self._restore(resumed)
        self.report = Report(self.folder, config, self.steps, objective.unit, self.progress.step, self.device)

    @property
    def optimizer(self) -> Any:
        """The ``DistributedOptimizer``."""
        return self._optimizer

    def run(self) -> Outcome:
        """Trains to the end, evaluates, and writes a last snapshot."""
        config, progress = self.config, self.progress
        outcome = Outcome(progress.step, {}, False, self.folder)
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
                if self.test is not None and (last or _due(config.eval_every, progress.step)):
                    evaluation = self._report_evaluation()
                    outcome = dataclasses.replace(
                        outcome,
                        evaluation=evaluation,
                        ended_early=self._ends_early(evaluation["loss"]) and not last,
                    )
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
            config.accumulate,
            checkpoint=config.checkpoint,
            weight=self.objective.weight if samples else _nothing,
            across_ranks=True,
            backward=self._backward,
        )
        if config.batch_norm.startswith("deferred"):
            commit_batch_norm(self.model, across_ranks=config.batch_norm == "deferred-ranks")
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
            "plan": None if self.plan is None else (self.folder / "plan.json").read_text("utf-8"),
            "threads": torch.get_num_threads(),
        }
        own = {
            "random": snapshot.random_state(),
            "reduction": self._optimizer.reduction_state_dict(),
            "buffers": dict(self.model.named_buffers()),
        }
        folder = self.folder / "snapshots"
        weights = self.model.state_dict()
        written = snapshot.write(folder, self.progress.step, weights=weights, common=common, own=own)
        if hvd.rank() == 0:
            snapshot.prune(folder, self.config.keep_snapshots)
        return written

    # -------------------------------------------------------------------------------- within a run

    def _report_evaluation(self) -> dict[str, float]:
        with self.report.apart():
            start = time.perf_counter()
            means = self.evaluate()
            self.report.evaluation(self.progress.step, means, time.perf_counter() - start)
        return means

    def _loss(self, batch: Batch) -> Tensor:
        with self.precision.autocast():
            return self.objective.loss(self.model(*batch.inputs, **batch.shared), batch)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.precision.backward(loss, self._optimizer, last)

    def _ends_early(self, loss: float) -> bool:
        progress = self.progress
        if progress.best is None or loss < progress.best:
            progress.best, progress.waited = loss, 0
        else:
            progress.waited += 1
        return self.config.patience is not None and progress.waited >= self.config.patience

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

    def _plan(self, resumed: Snapshot | None) -> Plan | None:
        config = self.config
        file = self.folder / "plan.json"
        if config.budget is None and config.plan is None:
            return None
        if resumed is not None and resumed.common["plan"] is not None:
            made = self._plan_of_snapshot(resumed.common["plan"], file)
        elif config.plan is not None:
            with errors_everywhere("hvd_ckpt.train.plan"):
                made = load_plan(Path(config.plan), self.model)
        else:
            assert config.budget is not None
            count = min(config.micro_batch, len(self.train))
            sample = self.train.batch(range(count), [0] * count)
            try:
                made = make_plan(
                    self.model,
                    sample.to(self.device),
                    self.objective,
                    config.budget,
                    AUTOCAST.get(config.precision),
                )
            except BudgetError as error:
                raise ConfigError(f"budget {config.budget}: {error}") from None
        if hvd.rank() == 0:
            made.save(file)
        made.apply(self.model)
        return made

    def _plan_of_snapshot(self, text: str, file: Path) -> Plan:
        if hvd.rank() == 0:
            file.write_text(text, "utf-8")
        hvd.barrier()
        with errors_everywhere("hvd_ckpt.train.plan"):
            return load_plan(file, self.model)

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
        self.progress = Progress(**common["progress"])
        self._optimizer.load_state_dict(common["optimizer"])
        if self.precision.scaler is not None and common["scaler"] is not None:
            self.precision.scaler.load_state_dict(common["scaler"])
        if resumed.ranks != hvd.size() or own is None:
            torch.manual_seed(_seed_of_rank(self.config.seed, self.progress.step))
            return
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in own["buffers"].items():
                buffers[name].copy_(value)
        self._optimizer.load_reduction_state_dict(own["reduction"])
        snapshot.set_random_state(own["random"])


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _nothing(batch: Batch) -> float:
    return 0.0


def _seed_of_rank(seed: int, step: int) -> int:
    """Ranks drop out different units; a run that goes on without its random state draws new ones."""
    rank: int = hvd.rank()
    return (seed * 1_000_003 + step) * 100_003 + rank + 1


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
