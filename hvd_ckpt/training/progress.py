"""The progress of a run on rank 0's terminal, or as lines elsewhere."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from typing_extensions import Self

from hvd_ckpt.heartbeat import Heartbeat, elapsed
from hvd_ckpt.launchers import launcher_terminal
from hvd_ckpt.text import show_bytes

_SHOWN = ("step", "kind", "loss", "lr", "rate", "unit", "memory", "memory_of", "samples", "seconds")


def peak_memory(device: torch.device | str = "cpu") -> tuple[int, str]:
    """The peak memory of this process in bytes, and its kind: on CUDA what PyTorch allocated on the device, else the resident set.

    The resident set counts the interpreter, data and caches too: it answers whether a machine is large enough.
    :mod:`hvd_ckpt.memory` measures what a step allocates.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"allocated on {device}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, "resident set"


class ProgressLine:
    """Shows records: on a terminal one live line, with evaluations above it; elsewhere a line for each, and one at least every 30
    seconds. A context manager.

    Args:
        steps: of the whole run.
        start: steps taken before a resume.
        console: by default the launcher's terminal, if it has one, else standard error.
        peak: measured peak of a step, in words, shown in place of the process's.
    """

    def __init__(
        self, steps: int, start: int = 0, console: Console | None = None, peak: str | None = None
    ) -> None:
        self._console = console or _console()
        self._steps, self._step, self._peak = steps, start, peak
        self._last: Mapping[str, Any] = {}
        self._perplexity = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            console=self._console,
            refresh_per_second=2,
            speed_estimate_period=600,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=start)
        self._beat = Heartbeat(lambda: self.say("  ".join(self._parts({}))))

    def __enter__(self) -> Self:
        self._progress.start()
        if self._progress.disable:
            self._beat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._beat.__exit__()
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Notes that a step is done."""
        self._step = step
        self._update()

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows a record; see :mod:`hvd_ckpt.training.logs`."""
        self._step = record["step"]
        training = record["kind"] == "train"
        if training:
            self._last = record
        elif "perplexity" in record:
            self._perplexity = f"perplexity {record['perplexity']:.5g} at step {record['step']}"
        self._update()
        if not training or self._progress.disable:
            self.say("  ".join(self._parts(record)))

    def say(self, text: str) -> None:
        """Shows one line of text, above the live line."""
        self._beat.said()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _update(self) -> None:
        self._progress.update(self._task, completed=self._step)
        if not self._progress.disable:
            parts = [*self._parts(self._last), *filter(None, [self._perplexity])]
            text = "  ".join(parts)[: max(self._console.width - 1, 20)]
            self._progress.update(self._task, description=text)

    def _parts(self, record: Mapping[str, Any]) -> list[str]:
        parts = [f"step {self._step:>{len(str(self._steps))}}/{self._steps}"]
        if record.get("kind") == "eval":
            parts.append("evaluation")
        if "loss" in record:
            parts.append(f"loss {record['loss']:.5g}")
        if "rate" in record:
            parts.append(quantity(record["rate"], f"{record['unit']}/s"))
        if "lr" in record:
            parts.append(f"lr {record['lr']:.3g}")
        if "memory" in record:
            parts.append(self._peak or f"peak {show_bytes(record['memory'])} ({record['memory_of']})")
        parts += [
            f"{name} {value:.5g}"
            for name, value in record.items()
            if name not in _SHOWN and isinstance(value, (int, float))
        ]
        if "samples" in record:
            parts.append(f"over {record['samples']} samples")
        if record.get("kind") != "eval":
            left = self._progress.tasks[self._task].time_remaining
            parts.append(f"{elapsed(math.nan if left is None else left)} left")
        return parts


def _console() -> Console:
    """The launcher's terminal, or standard error."""
    console = Console(stderr=True)
    path = None if console.is_terminal else launcher_terminal()
    if path is None:
        return console
    try:  # a launched process has no terminal, and must not get one
        terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        width = os.get_terminal_size(terminal).columns
        return Console(file=os.fdopen(terminal, "w", encoding="utf-8"), width=width or None)
    except OSError:
        return console


def quantity(value: float, unit: str) -> str:
    """Three digits and a letter for thousands: ``12.3k tokens/s``."""
    for letter in ("", "k", "M", "G"):
        if not math.isfinite(value) or abs(value) < 999.5:
            return f"{value:.3g}{letter} {unit}"
        value /= 1000
    return f"{value:.3g}T {unit}"
