"""How fast a run is, how far it got, and what rank 0 shows of it."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from hvd_ckpt.heartbeat import Heartbeat, elapsed
from hvd_ckpt.launchers import launcher_terminal
from hvd_ckpt.planning.budget import show_bytes

__all__ = ["Meter", "ProcessMemory", "ProgressLine", "Reading", "peak_memory", "quantity"]

_REDRAW_SECONDS = 0.5
_SHOWN = ("step", "kind", "loss", "lr", "rate", "unit", "memory", "memory_of", "samples", "seconds")


@dataclass(frozen=True)
class ProcessMemory:
    """The most memory a process has held.

    Attributes:
        bytes: the number.
        what: which bytes: ``resident set``, or those PyTorch allocated on a CUDA device.
    """

    bytes: int
    what: str


def peak_memory(device: torch.device | str = "cpu") -> ProcessMemory:
    """On CUDA what PyTorch allocated on the device since its statistics were last reset, else the resident set since the start.

    The resident set counts the interpreter, data and caches too: it answers whether a machine is large enough.
    :mod:`hvd_ckpt.memory` says what a step allocates.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return ProcessMemory(torch.cuda.max_memory_allocated(device), f"allocated on {device}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ProcessMemory(peak if sys.platform == "darwin" else peak * 1024, "resident set")


@dataclass(frozen=True)
class Reading:
    """What a :class:`Meter` counted between two readings.

    Attributes:
        steps: calls of :meth:`Meter.add`.
        loss: mean over all terms; NaN if there were none.
        units: tokens, images, ... of all ranks.
        seconds: without pauses.
    """

    steps: int
    loss: float
    units: float
    seconds: float

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds if self.seconds > 0 else math.nan

    def record(
        self, step: int, lr: float, unit: str, memory: ProcessMemory, **metrics: float
    ) -> dict[str, Any]:
        """The record of kind ``train`` for :mod:`hvd_ckpt.training.logs`."""
        return {
            "step": step,
            "kind": "train",
            "loss": self.loss,
            "lr": lr,
            "rate": self.rate,
            "unit": unit,
            "memory": memory.bytes,
            "memory_of": memory.what,
            "seconds": self.seconds,
            **metrics,
        }


class Meter:
    """Adds up loss, units and seconds, and waits for the device only when it is read.

    It runs from the moment it is made.

    Args:
        device: that the steps run on.
        clock: gives seconds.
    """

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = torch.device(device)
        self._clock = clock
        self._loss: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._units: Tensor | float = 0
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = clock()

    def add(self, loss: Tensor | float, weight: Tensor | float, units: Tensor | float) -> None:
        """Counts one step of this rank.

        Args:
            loss: mean over the step's terms, a number or a tensor of no dimensions; of no account if there are none.
            weight: the number of terms.
            units: tokens, images, ...
        """
        if isinstance(loss, Tensor):
            loss = loss.detach().double()
        if isinstance(weight, Tensor):
            weight = weight.detach()
            self._loss = self._loss + torch.where(weight == 0, 0.0, loss * weight)
        elif weight:
            self._loss = self._loss + loss * weight
        self._weight = self._weight + weight
        self._units = self._units + units
        self._steps += 1

    def loss_so_far(self) -> tuple[float, float]:
        """The sum of the loss over all terms since the last reading, and the number of terms; of this rank."""
        return float(self._loss), float(self._weight)

    def take_up(self, loss: float, weight: float) -> None:
        """Goes on from what :meth:`loss_so_far` gave, bit for bit."""
        self._loss, self._weight = self._loss + loss, self._weight + weight

    def pause(self) -> None:
        """Stops the clock: what follows, such as an evaluation, is no training."""
        if self._since is not None:
            self._wait()
            self._seconds += self._clock() - self._since
            self._since = None

    def resume(self) -> None:
        """Lets the clock go on."""
        if self._since is None:
            self._wait()
            self._since = self._clock()

    def read(self, add_ranks: Callable[[Tensor], Tensor] | None = None) -> Reading:
        """What was counted since the last reading; counting begins anew.

        Args:
            add_ranks: sums a float64 tensor of 3 elements on the CPU over all ranks; then every rank has to read.
        """
        own = torch.tensor([float(self._loss), float(self._weight), float(self._units)], dtype=torch.float64)
        loss, weight, units = (own if add_ranks is None else add_ranks(own)).tolist()
        seconds = self._seconds
        if self._since is not None:
            now = self._clock()
            seconds += now - self._since
            self._since = now
        steps = self._steps
        self._loss, self._weight, self._units, self._steps, self._seconds = 0.0, 0.0, 0, 0, 0.0
        return Reading(steps, loss / weight if weight else math.nan, units, seconds)

    def _wait(self) -> None:
        """Work that was only launched belongs to the side of a pause where it was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class ProgressLine:
    """Shows records: on a terminal one live line, with evaluations above it; elsewhere a line for each, and one at least every 30
    seconds. For rank 0.

    A context manager; nothing is shown outside.

    Args:
        steps: of the whole run.
        start: steps taken before a resume.
        console: where to; if None the launcher's terminal, if it has one, else standard error.
        clock: gives seconds.
        peak: of a step, in words, to be shown in place of the process's.
    """

    def __init__(
        self,
        steps: int,
        start: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
        peak: str | None = None,
    ) -> None:
        self._console = console or _console()
        self._peak = peak
        self._beat = Heartbeat(lambda: self._print("  ".join(self._line({}))))
        self._clock = clock
        self._steps, self._start, self._step = steps, start, start
        self._began = self._drawn = clock()
        self._last: Mapping[str, Any] = {}
        self._evaluated: Mapping[str, Any] = {}
        self._live: Live | None = None

    def __enter__(self) -> ProgressLine:
        self._began = self._drawn = self._clock()
        if self._console.is_terminal:
            self._live = Live(self._text(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._beat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._beat.__exit__()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def advance(self, step: int) -> None:
        """Says that a step is done; a terminal shows it soon. Free of charge in most calls."""
        self._step = step
        if self._live is not None and self._clock() - self._drawn >= _REDRAW_SECONDS:
            self._redraw(self._live)

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows a record; see :mod:`hvd_ckpt.training.logs`."""
        self._step = record["step"]
        if record["kind"] == "train":
            self._last = record
            if self._live is not None:
                self._redraw(self._live)
                return
        else:
            self._evaluated = record
        self._print("  ".join(self._line(record)))

    def say(self, text: str) -> None:
        """Shows one line of text, above the live line."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._beat.said()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _redraw(self, live: Live) -> None:
        self._drawn = self._clock()
        live.update(self._text(), refresh=True)

    def _text(self) -> Text:
        parts = self._line(self._last)
        if "perplexity" in self._evaluated:
            parts.append(f"perplexity {self._evaluated['perplexity']:.5g} at step {self._evaluated['step']}")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _line(self, record: Mapping[str, Any]) -> list[str]:
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
            parts.append(f"{elapsed(self._seconds_left())} left")
        return parts

    def _seconds_left(self) -> float:
        """From the wall clock, since evaluations and snapshots take their time too."""
        done = self._step - self._start
        if done <= 0:
            return math.nan
        return (self._clock() - self._began) / done * (self._steps - self._step)


def _console() -> Console:
    """The launcher's terminal, or standard error."""
    console = Console(stderr=True)
    path = None if console.is_terminal else launcher_terminal()
    if path is None:
        return console
    try:
        terminal = os.open(
            path, os.O_WRONLY | os.O_NOCTTY
        )  # a launched process has no terminal, and must not get one
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
