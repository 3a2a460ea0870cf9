"""What a run tells about itself: a line on rank 0's terminal, logs, a plot of the loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor
from typing_extensions import Self

from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.logs import Logs
from hvd_ckpt.training.microbatch import Accumulated
from hvd_ckpt.training.progress import Meter, ProgressLine, peak_memory

__all__ = ["Report"]


class Report:
    """Counts on every rank, and shows and writes on rank 0. A context manager around the training loop.

    Args:
        folder: of the run.
        config: of the run.
        steps: of the whole run.
        unit: of throughput.
        start: steps taken before; what the logs hold of later ones is taken back.
        device: that the steps run on.
        peak: of a step, in words, where it is known.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        steps: int,
        unit: str,
        start: int,
        device: torch.device,
        peak: str | None = None,
    ) -> None:
        self._folder, self._config, self._steps, self._start = folder, config, steps, start
        self._unit, self._device, self._peak = unit, device, peak
        self._meter = Meter(device)
        self._before: tuple[float, float] = (0.0, 0.0)
        self._open = ExitStack()
        self._logs: Logs | None = None
        self._line: ProgressLine | None = None
        self._log_failed = False

    def __enter__(self) -> Self:
        if hvd.rank() == 0:
            self._line = self._open.enter_context(ProgressLine(self._steps, self._start, peak=self._peak))
            self._logs = self._open_logs(self._line)
        self._meter = Meter(self._device)
        self._meter.take_up(*self._before)
        return self

    def _open_logs(self, line: ProgressLine) -> Logs | None:
        """The logs, without what they hold of later steps. One that is damaged is put aside; the training is worth more."""
        path = self._folder / "log.jsonl"
        try:
            try:
                logs = self._rewound_logs()
            except ValueError as error:
                aside = path.with_name(f"log-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
                path.rename(aside)
                line.say(f"Warning: {error}: it is '{aside.name}' now, and a new log begins.")
                logs = self._rewound_logs()
        except (OSError, ValueError) as error:
            line.say(f"Warning: there will be no log: {error}")
            return None
        if logs.unavailable is not None:
            line.say(logs.unavailable)
        return logs

    def _rewound_logs(self) -> Logs:
        logs = Logs(self._folder, self._config.tensorboard)
        try:
            logs.rewind(self._start)
        except BaseException:
            logs.close()
            raise
        return self._open.enter_context(logs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def open_entry(self) -> tuple[float, float]:
        """Loss and terms of this rank that the next entry of the log will count so far."""
        return self._meter.loss_so_far()

    def go_on(self, entry: tuple[float, float]) -> None:
        """Takes up an :meth:`open_entry` of the run before; its speed is not known."""
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
        self._tell(reading.record(step, lr, self._unit, peak_memory(self._device)))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What runs inside is no training, and does not count in its speed."""
        self._meter.pause()
        try:
            yield
        finally:
            self._meter.resume()

    def evaluation(self, step: int, means: dict[str, float], seconds: float) -> None:
        """Writes the outcome of an evaluation."""
        self._tell({"step": step, "kind": "eval", **means, "seconds": seconds})

    def draw(self) -> Path | None:
        """Draws the loss over the steps; the picture's path on rank 0, None if there is none."""
        if hvd.rank() != 0:
            return None
        picture = self._folder / "loss.png"
        try:
            from hvd_ckpt.training.plots import loss_plot

            loss_plot({self._config.model: self._folder / "log.jsonl"}, picture)
        except (OSError, ValueError) as error:
            self.say(f"Warning: no plot of the loss: {error}")
        except ImportError as error:
            self.say(f"No plot of the loss: {explain_import_error(error) or error}")
        else:
            return picture
        return None

    def _tell(self, record: dict[str, Any]) -> None:
        """Writes and shows a record. A log that cannot be written is a warning: the training is worth more."""
        if self._line is None:
            return
        try:
            if self._logs is not None:
                self._logs.write(record)
        except OSError as error:
            if not self._log_failed:
                self._line.say(f"Warning: the log of step {record['step']} is not written: {error.strerror}")
            self._log_failed = True
        else:
            self._log_failed = False
        self._line.show(record)


def _sum_over_ranks(values: Tensor) -> Tensor:
    if hvd.size() == 1:
        return values
    total: Tensor = hvd.allreduce(values, op=hvd.Sum, name="hvd_ckpt.report")
    return total
