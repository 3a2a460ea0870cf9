"""The output of a run: lines of progress of rank 0, logs, and traces of steps."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import Tensor
from typing_extensions import Self

from hvd_ckpt.app.training.callbacks import Callbacks
from hvd_ckpt.app.training.field_types import traced_steps
from hvd_ckpt.app.training.logs import KEYS, TIMES, Logs
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.spans import KINDS, SpanTimes, recording
from hvd_ckpt.utils.text import Heartbeat, elapsed, show_bytes

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


class Meter:
    """Adds up loss, units and seconds, and waits for the device only when it is read.

    It runs from the moment it is made, or from :meth:`start`.

    Args:
        parts: number of parts of a batch, which are added up separately: this rank's logical replicas, or 1.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        parts: int = 1,
    ) -> None:
        self._device, self._clock = torch.device(device), clock
        self.spans = SpanTimes(self._device)
        self._losses: list[Tensor | float] = [0.0] * parts
        self._weights, self._units, self._steps = [0.0] * parts, 0.0, 0
        self._seconds = 0.0
        self.start()

    def start(self) -> None:
        """Time counts from now on."""
        self._since = self._clock()

    def add(self, parts: Sequence[tuple[Tensor | float, float]], units: float) -> None:
        """Counts a step: of each part the loss and the number of terms that it is a mean of; and units (tokens, images, ...)."""
        for part, (loss, weight) in enumerate(parts):
            # The loss of a part without terms may be nan, and does not count.
            if weight:
                term = (loss.detach().double() if isinstance(loss, Tensor) else loss) * weight
                self._losses[part] = self._losses[part] + term
            self._weights[part] += weight
        self._units += units
        self._steps += 1

    def pending(self) -> list[tuple[float, float]]:
        """Of each part the sum of the loss over all terms since the last reading, and the number of terms; a snapshot holds it."""
        return [(float(loss), weight) for loss, weight in zip(self._losses, self._weights)]

    def load_pending(self, pending: Sequence[tuple[float, float]]) -> None:
        """Continues from what :meth:`pending` returned, bit for bit."""
        for part, (loss, weight) in zip(range(len(self._losses)), pending):
            self._losses[part], self._weights[part] = loss, weight

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """A context that does not count as training, such as an evaluation."""
        self._wait()
        self._seconds += self._clock() - self._since
        try:
            # Spans of an evaluation would count as parts of a training step.
            with recording(None):
                yield
        finally:
            self._wait()
            self.start()

    def read(self, gather: Callable[[Tensor], Tensor] = lambda rows: rows) -> dict[str, float]:
        """``loss``, ``rate`` and ``seconds`` since the last reading, and :data:`TIMES`; counting begins again.

        Args:
            gather: takes a float64 tensor [parts, columns] on the CPU, and returns the rows of all ranks; then every rank has to
                read.
        """
        # Reading the losses waits for the device, so the clock is read after them.
        pending = self.pending()
        now = self._clock()
        seconds = self._seconds + now - self._since
        of_steps = (seconds, *self.spans.read().values())
        more = [self._units, 1.0, *(value / max(self._steps, 1) for value in of_steps)]
        # One row for each part of the batch. Rows are added in the order of the parts, whichever ranks have them: the log has the
        # same bits. What is counted for the rank as a whole stands in its first row.
        rows = torch.tensor([[*pair, *[0.0] * len(more)] for pair in pending], dtype=torch.float64)
        rows[0, 2:] = torch.tensor(more, dtype=torch.float64)
        loss, weight, units, ranks, *times = gather(rows).sum(0).tolist()
        self._losses, self._weights = [0.0] * len(rows), [0.0] * len(rows)
        self._units, self._seconds, self._since, self._steps = 0.0, 0.0, now, 0
        return {
            "loss": loss / weight if weight else math.nan,
            "rate": units / seconds if seconds > 0 else math.nan,
            "seconds": seconds,
            **{name: value / ranks for name, value in zip(TIMES, times)},
        }

    def _wait(self) -> None:
        """Work that was only launched counts where it was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class ProgressLines(Heartbeat):
    """Prints a line for each record, and one at least every 30 seconds, on standard error. A context manager.

    Args:
        start: steps taken before a resume.
    """

    def __init__(self, steps: int, start: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._step, self._first = steps, start, start
        self._clock, self._since = clock, clock()
        super().__init__(lambda: self.show({}))

    def __enter__(self) -> Self:
        self._since = self._clock()
        return super().__enter__()

    def advance(self, step: int) -> None:
        """Notes that a step is done."""
        self._step = step

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows a record, see :mod:`~hvd_ckpt.app.training.logs`; an empty one is the position of the run."""
        self._step = record.get("step", self._step)
        self.say("  ".join(self._parts(record)))

    def say(self, text: str) -> None:
        """Shows one line of text. If nobody reads it, or the disk of the output is full, training continues all the same."""
        self.said()
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def _parts(self, record: Mapping[str, Any]) -> list[str]:
        parts = [f"step {self._step:>{len(str(self._steps))}}/{self._steps}"]
        if record.get("kind") == "eval":
            parts.append("evaluation")
        for name, value in record.items():
            if name == "rate":
                parts.append(quantity(value, f"{record['unit']}/s"))
            elif name == "memory":
                parts.append(f"peak {show_bytes(value)} ({record['memory_of']})")
            elif name == "samples":
                parts.append(f"over {value} samples")
            elif name in ("loss", "lr") or (name not in KEYS and isinstance(value, (int, float))):
                parts.append(f"{name} {value:.5g}")
        if record.get("kind") != "eval":
            taken, seconds = self._step - self._first, self._clock() - self._since
            left = seconds / taken * (self._steps - self._step) if taken else math.nan
            parts.append(f"{elapsed(left)} left")
        if step := record.get("step_seconds"):
            shares = {kind: record[f"{kind}_seconds"] / step for kind in KINDS}
            parts.append(", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.01))
        return list(filter(None, parts))


def quantity(value: float, unit: str) -> str:
    """Three digits and a letter for thousands: ``12.3k tokens/s``."""
    for letter in ("", "k", "M", "G"):
        if not math.isfinite(value) or abs(value) < 999.5:
            return f"{value:.3g}{letter} {unit}"
        value /= 1000
    return f"{value:.3g}T {unit}"


class Report:
    """Counts on every rank, and shows and writes on rank 0. A context manager around the training loop.

    Args:
        run: the logs drop records of steps after those that it has taken.
        line: on rank 0, where records are shown.

    Attributes:
        meter: counts what the next entry of the log says.
        tell: calls a method of all callbacks.
    """

    def __init__(self, run: Trainer, line: ProgressLines | None, callbacks: Sequence[Any]) -> None:
        self.tell = Callbacks(list(callbacks), self.say)
        self._run, self._line, self._start = run, line, run.progress.step
        self.meter = Meter(run.device, parts=run.mode.parts)
        self._open = ExitStack()
        self._logs: Logs | None = None

    def __enter__(self) -> Self:
        if self._line is not None:
            self._open.enter_context(self._line)
            try:
                self._logs = self._open.enter_context(self._open_logs())
            except (OSError, ValueError) as error:
                self.say(f"Warning: there will be no log: {error}")
        self._open.enter_context(recording(self.meter.spans))
        self.meter.start()
        return self

    def _open_logs(self) -> Logs:
        """The logs. A damaged one is put aside: it must not end the training."""
        folder = self._run.folder
        try:
            return Logs(folder, self._start)
        except ValueError as error:
            aside = f"log-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
            (folder / "log.jsonl").rename(folder / aside)
            self.say(f"Warning: {error}: it is renamed to '{aside}', and a new log begins.")
            return Logs(folder, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            # A callback that raises now must not replace the error of the run.
            if error is not None:
                with contextlib.suppress(Exception):
                    self.tell("on_end", None)

    def say(self, text: str) -> None:
        """Shows one line of text."""
        if self._line is not None:
            self._line.say(text)

    def add(self, step: int, accumulated: Sequence[Accumulated], units: int) -> None:
        """Counts a step of this rank, of each of its parts."""
        self.meter.add(accumulated, units)
        if self._line is not None:
            self._line.advance(step)

    def counts(self) -> list[tuple[float, ...]]:
        """The loss and terms that the next entry of the log counts so far, of each part of a batch on all ranks. Collective."""
        rows = torch.tensor(self.meter.pending(), dtype=torch.float64)
        return [tuple(row) for row in hvd.allgather(rows, name="hvd_ckpt.train.logged").tolist()]

    def load_counts(self, counts: Sequence[tuple[float, float]]) -> None:
        """Continues from :meth:`counts`; counts nothing so far if a batch had another number of parts."""
        parts: int = self._run.mode.parts
        if len(counts) == parts * hvd.size():
            self.meter.load_pending(counts[parts * hvd.rank() :])

    def log(self, step: int, lr: float) -> None:
        """Writes what all ranks have counted since the last time. Collective."""
        run = self._run
        reading = self.meter.read(lambda rows: hvd.allgather(rows, name="hvd_ckpt.report"))
        memory, kind = peak_memory(run.device)
        units = {"unit": run.objective.unit, "memory": memory, "memory_of": kind}
        local = {} if run.config.local is None else {"divergence": run.optimizer.divergence}
        self._write({"step": step, "kind": "train", **reading, "lr": lr, **units, **local})

    def evaluation(self, step: int, means: dict[str, float], seconds: float) -> None:
        """Writes the result of an evaluation."""
        self._write({"step": step, "kind": "eval", **means, "seconds": seconds})

    def _write(self, record: dict[str, Any]) -> None:
        """Writes and shows a record. A log that cannot be written is a warning: it must not end the training."""
        if self._line is None:
            return
        try:
            if self._logs is not None:
                self._logs.write(record)
        except OSError as error:
            self.say(f"Warning: the log of step {record['step']} is not written: {error.strerror or error}")
        # The log comes first: callbacks and a reader of the screen may look into it.
        self._line.show(record)
        self.tell("on_log" if record["kind"] == "train" else "on_evaluation", record)


def peak_memory(device: torch.device) -> tuple[int, str]:
    """The peak memory of this process in bytes, and its kind: on CUDA what PyTorch allocated on the device, else the resident set.

    The resident set counts the interpreter, data and caches too: it answers whether a machine is large enough.
    :mod:`hvd_ckpt.utils.memory` measures what a step allocates.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"allocated on {device}"
    # It is in bytes on macOS, and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, "resident set"


class StepTrace(AbstractContextManager["StepTrace"]):
    """Writes a trace of ``torch.profiler`` of the configured steps, each process a file. A context manager around the loop.

    Args:
        steps: first and last, counted from 1, such as ``10:15``; None for no trace.
        report: report of the run, which does not count the time that writing takes.
    """

    def __init__(self, steps: str | None, folder: Path, report: Report) -> None:
        self._steps = range(0) if steps is None else traced_steps(steps)
        self._file = folder / "profile" / f"rank-{current().number:05}.json"
        self._report = report
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """The step with this number begins."""
        if step in self._steps and self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after(self, step: int) -> None:
        """The step is over; after the last of the trace it is written."""
        if self._profiler is not None and step + 1 not in self._steps:
            with self._report.meter.excluded():
                self.__exit__()

    def __exit__(self, *_: object) -> None:
        """Ends the trace and writes it. A file that cannot be written is a warning: it must not end the training."""
        # Forgotten first: an error while it is written must not write it again at the end of the run.
        profiler, self._profiler, self._steps = self._profiler, None, range(0)
        if profiler is None:
            return
        profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._report.say(f"Warning: the trace '{self._file}' is not written: {error}")
