"""The output of a run: a summary before the first step, progress on rank 0's terminal, logs, and a plot of the loss."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from typing_extensions import Self

from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.models.objectives import Objective
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.runtime import controller
from hvd_ckpt.text import show_bytes
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.logs import Logs
from hvd_ckpt.training.microbatch import Accumulated
from hvd_ckpt.training.progress import ProgressLine, peak_memory

DEFAULT_DATA = {
    "tokens": "the standard library's source",
    "images": "scikit-learn's digits",
    "volumes": "synthetic ellipsoids",
}


class DryRun(Exception):
    """The configuration asks for the summary of the run alone."""


def print_summary(
    config: Config,
    model: nn.Module,
    objective: Objective,
    train: Dataset,
    test: Dataset | None,
    folder: Path,
    device: torch.device,
    taken: int,
    steps: int,
) -> None:
    """Prints on rank 0 what a run is about to do, after ``taken`` of ``steps`` steps.

    Raises:
        DryRun: the configuration asks for nothing else; on every rank.
    """
    if hvd.rank() == 0:
        parameters = list(model.parameters())
        count, size = sum(one.numel() for one in parameters), sum(one.nbytes for one in parameters)
        units, unit = objective.units(train.batch([0], [0])), objective.unit
        own = DEFAULT_DATA.get(unit) if type(train).__module__.startswith("hvd_ckpt.") else None
        source = config.text or config.images or config.volumes or own or type(train).__name__
        samples = config.batch * hvd.size()
        each = "" if units == 1 else f", {samples * units:,} {unit}"
        parts = "" if config.accumulate == 1 else f" in {config.accumulate} micro-batches"
        epochs = (steps - taken) * samples / len(train)
        lines = {
            "model": f"{config.model}: {count:,} parameters, {show_bytes(size)}; {config.precision}",
            "data": f"{source}: {len(train):,} samples to train on, {len(test or ()):,} to evaluate on",
            "step": f"{config.batch} samples on each rank{parts}: {samples:,} samples{each}",
            "steps": f"{steps - taken:,} ({epochs:.3g} epochs); {config.optimizer}, learning rate {config.lr:g}, {config.schedule}",
            "memory": _recomputation(config) + ("" if not config.stage else f"; sharded: {config.shard}"),
            "ranks": f"{hvd.size()} over {controller()}, on {device}, CPU threads of each: {torch.get_num_threads()}",
            "folder": str(folder),
        }
        if taken:
            lines["steps"] += f"; resumes after step {taken:,} of {steps:,}"
        text = "\n".join(f"{name:<7} {line}" for name, line in lines.items())
        print(text, file=sys.stderr, flush=True)
    if config.dry_run:
        raise DryRun


def _recomputation(config: Config) -> str:
    if config.budget is not None:
        return f"a plan, to be made for {config.budget}"
    if config.plan is not None:
        return f"the plan {config.plan}"
    if config.segments is not None:
        return f"recomputed in {config.segments} segments"
    return "no recomputation (--budget and --segments recompute)"


class Meter:
    """Adds up loss, units and seconds, and waits for the device only when it is read.

    It runs from the moment it is made.

    Args:
        device: of the steps.
        clock: returns seconds.
    """

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock = torch.device(device), clock
        self._loss: Tensor | float = 0.0
        self._weight = self._units = 0.0
        self._seconds, self._since = 0.0, clock()

    def add(self, loss: Tensor | float, weight: float, units: float) -> None:
        """Counts one step of this rank: its loss, a mean over ``weight`` terms, and its units (tokens, images, ...)."""
        if weight:
            self._loss = self._loss + (loss.detach().double() if isinstance(loss, Tensor) else loss) * weight
        self._weight += weight
        self._units += units

    def pending(self) -> tuple[float, float]:
        """The sum of the loss over all terms since the last reading, and the number of terms; of this rank."""
        return float(self._loss), self._weight

    def load_pending(self, pending: tuple[float, float]) -> None:
        """Continues from what :meth:`pending` returned, bit for bit."""
        self._loss, self._weight = self._loss + pending[0], self._weight + pending[1]

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """A context that does not count as training, such as an evaluation."""
        self._wait()
        self._seconds += self._clock() - self._since
        try:
            yield
        finally:
            self._wait()
            self._since = self._clock()

    def read(self, add_ranks: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """``loss``, ``rate`` and ``seconds`` since the last reading; counting begins anew.

        Args:
            add_ranks: sums a float64 tensor of 3 elements on the CPU over all ranks; then every rank has to read.
        """
        own = torch.tensor([float(self._loss), self._weight, self._units], dtype=torch.float64)
        loss, weight, units = (own if add_ranks is None else add_ranks(own)).tolist()
        now = self._clock()
        seconds = self._seconds + now - self._since
        self._loss, self._weight, self._units, self._seconds, self._since = 0.0, 0.0, 0.0, 0.0, now
        return {
            "loss": loss / weight if weight else math.nan,
            "rate": units / seconds if seconds > 0 else math.nan,
            "seconds": seconds,
        }

    def _wait(self) -> None:
        """Work that was only launched counts where it was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Report:
    """Counts on every rank, and shows and writes on rank 0. A context manager around the training loop.

    Args:
        steps: of the whole run.
        unit: of throughput.
        start: steps taken before; records of later ones are dropped from the logs.
        plan: its measured peak is shown.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        steps: int,
        unit: str,
        start: int,
        device: torch.device,
        plan: Plan | None = None,
    ) -> None:
        self._folder, self._config, self._steps, self._start = folder, config, steps, start
        self._unit, self._device, self._plan = unit, device, plan
        self._meter = Meter(device)
        self._before: tuple[float, float] = (0.0, 0.0)
        self._open = ExitStack()
        self._logs: Logs | None = None
        self._line: ProgressLine | None = None
        self._log_failed = False

    def __enter__(self) -> Self:
        if hvd.rank() == 0:
            line = ProgressLine(self._steps, self._start, peak=_planned_peak(self._plan))
            self._line = self._open.enter_context(line)
            try:
                self._logs = self._open.enter_context(self._open_logs())
            except (OSError, ValueError) as error:
                self.say(f"Warning: there will be no log: {error}")
        self._meter = Meter(self._device)
        self._meter.load_pending(self._before)
        return self

    def _open_logs(self) -> Logs:
        """The logs. A damaged one is put aside: it must not end the training."""
        try:
            logs = Logs(self._folder, self._config.tensorboard, self._start)
        except ValueError as error:
            aside = f"log-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
            (self._folder / "log.jsonl").rename(self._folder / aside)
            self.say(f"Warning: {error}: it is renamed to '{aside}', and a new log begins.")
            logs = Logs(self._folder, self._config.tensorboard, self._start)
        if logs.unavailable is not None:
            self.say(logs.unavailable)
        return logs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def open_entry(self) -> tuple[float, float]:
        """Loss and terms of this rank that the next entry of the log will count so far."""
        return self._meter.pending()

    def resume(self, entry: tuple[float, float]) -> None:
        """Continues an :meth:`open_entry` of the run before."""
        self._before = entry

    def say(self, text: str) -> None:
        """Shows one line of text."""
        if self._line is not None:
            self._line.say(text)

    def add(self, step: int, accumulated: Accumulated, units: int) -> None:
        """Counts a step of this rank."""
        self._meter.add(accumulated.loss, accumulated.weight, units)
        if self._line is not None:
            self._line.advance(step)

    def log(self, step: int, lr: float) -> None:
        """Writes what all ranks have counted since the last time. Collective."""
        reading = self._meter.read(_sum_over_ranks)
        memory, kind = peak_memory(self._device)
        units = {"unit": self._unit, "memory": memory, "memory_of": kind}
        self._write({"step": step, "kind": "train", "lr": lr, **reading, **units})

    def excluded(self) -> contextlib.AbstractContextManager[None]:
        """A context that does not count as training."""
        return self._meter.excluded()

    def evaluation(self, step: int, means: dict[str, float], seconds: float) -> None:
        """Writes the result of an evaluation."""
        self._write({"step": step, "kind": "eval", **means, "seconds": seconds})

    def draw(self) -> None:
        """Draws the loss over the steps, on rank 0."""
        if hvd.rank() != 0:
            return
        try:
            from hvd_ckpt.training.plots import loss_plot

            loss_plot({self._config.model: self._folder / "log.jsonl"}, self._folder / "loss.png")
        except (OSError, ValueError) as error:
            self.say(f"Warning: no plot of the loss: {error}")
        except ImportError as error:
            self.say(f"No plot of the loss: {explain_import_error(error) or error}")

    def _write(self, record: dict[str, Any]) -> None:
        """Writes and shows a record. A log that cannot be written is a warning: it must not end the training."""
        if self._line is None:
            return
        try:
            if self._logs is not None:
                self._logs.write(record)
        except OSError as error:
            if not self._log_failed:
                self.say(
                    f"Warning: the log of step {record['step']} is not written: {error.strerror or error}"
                )
            self._log_failed = True
        else:
            self._log_failed = False
        self._line.show(record)


def _planned_peak(plan: Plan | None) -> str | None:
    """The measured peak that a plan's budget limits, in words; None without a plan."""
    if plan is None or plan.measured is None:
        return None
    budget = "" if plan.budget is None else f" of {show_bytes(plan.budget)} budgeted"
    return f"step's peak {show_bytes(plan.measured.peak_bytes)}{budget}"


def _sum_over_ranks(values: Tensor) -> Tensor:
    if hvd.size() == 1:
        return values
    total: Tensor = hvd.allreduce(values, op=hvd.Sum, name="hvd_ckpt.report")
    return total
