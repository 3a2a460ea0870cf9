"""Traces of some steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from hvd_ckpt.app.training.field_types import first_and_last
from hvd_ckpt.app.training.report import Report
from hvd_ckpt.processes.grid import current


class StepTrace:
    """Writes a trace of ``torch.profiler`` of the configured steps, each process a file. A context manager around the loop.

    Args:
        steps: first and last, counted from 1, such as ``10:15``; None for no trace.
        folder: folder of the run.
        report: report of the run, which does not count the time that writing takes.
    """

    def __init__(self, steps: str | None, folder: Path, report: Report) -> None:
        self._steps = None if steps is None else first_and_last(steps)
        self._file = folder / "profile" / f"rank-{current().number:05}.json"
        self._report = report
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """The step with this number begins."""
        if self._steps is None or self._profiler is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def after(self, step: int) -> None:
        """The step is over; after the last of the trace it is written."""
        if self._profiler is not None and self._steps is not None and step >= self._steps[1]:
            with self._report.meter.excluded():
                self._write()

    def _write(self) -> None:
        """Ends the trace and writes it. A file that cannot be written is a warning: it must not end the training."""
        if self._profiler is None:
            return
        # Forgotten first: an error while it is written must not write it again at the end of the run.
        profiler, self._profiler, self._steps = self._profiler, None, None
        profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._report.say(f"Warning: the trace '{self._file}' is not written: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
