"""Traces of some steps of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.app.training.field_types import traced_steps
from hvd_ckpt.app.training.report import Report
from hvd_ckpt.processes.grid import current


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
                self._write()

    def _write(self) -> None:
        """Ends the trace and writes it. A file that cannot be written is a warning: it must not end the training."""
        if self._profiler is None:
            return
        # Forgotten first: an error while it is written must not write it again at the end of the run.
        profiler, self._profiler, self._steps = self._profiler, None, range(0)
        profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._report.say(f"Warning: the trace '{self._file}' is not written: {error}")

    def __exit__(self, *_: object) -> None:
        self._write()
