"""A few steps of training as configured, which are measured: :func:`trial`, and :func:`compared` for several in turn."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from hvd_ckpt.app.training.build import assemble_in_turn
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.ending import FATAL_ERRORS
from hvd_ckpt.app.training.model import device_of
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.collectives.agreement import of_all_processes, of_first_process
from hvd_ckpt.processes import runtime
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.links import StageFailed
from hvd_ckpt.utils.memory import bytes_alive, memory_of_tensors, memory_since, recording_peak

RECORDED = 3  # the first steps, which recording slows down: a first one allocates what later ones use again
ROUNDS = 4  # of trials in turn at most
LEAST = 3  # settings that are tried in each of them
SECONDS = 45.0  # of all trials, after which no further round begins
NOT_TRIED = "it was not tried"
OUT_OF_MEMORY = "out of memory"
OTHERS = (  # settings of what is not in a step
    "callback", "dry_run", "epochs", "eval_every", "patience", "profile", "resume", "snapshot_every", "tensorboard",
    "warmup",
)  # fmt: skip


class Trial(NamedTuple):
    """Seconds of a step and bytes of its peak, of the rank that needs most."""

    seconds: float
    peak: int


class _Steps(Trainer):
    """A run of steps alone: no log, no evaluation, and no snapshot, for which all hosts would need one folder."""

    def _do_what_is_due(self) -> None:
        if self.progress.step == self.steps:
            self.reports.handle_waiting()


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder of the first process, on all processes. Collective."""
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt-trial-", ignore_cleanup_errors=True) as folder:
        yield of_first_process(folder, "hvd_ckpt.trial.folder")


def trial(settings: Mapping[str, Any], steps: int = 6, plans: str | None = None) -> Trial:
    """Trains some steps with settings of ``hvd-ckpt train``. Collective; starts Horovod anew where it has other stages or parts.

    Args:
        steps: that are timed, after those of which the peak is recorded.
        plans: folder of the first process for plans, from which one is taken again.

    Raises:
        ConfigError: the settings do not fit; raised on every rank.
        KeyboardInterrupt: a signal has stopped it; raised on every rank.
    """
    # Hooks and parameters of the trainer before refer to each other, so only the collector frees its memory.
    gc.collect()
    stages, tensor = settings.get("pipeline", 1), settings.get("tensor", 1)
    if hvd.is_initialized() and (current().stages, current().tensor) != (stages, tensor):
        hvd.shutdown()
    if not hvd.is_initialized():
        runtime.init(stages=stages, tensor=tensor)
    # The trainer calls after each step but the last.
    others = {name: value for name, value in settings.items() if name not in OTHERS}
    if plans is not None and "budget" in settings:
        others["budget"] = f"{settings['budget']},cache={plans}"
    number = RECORDED + steps + 1
    ends: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        config = Config.make({**others, "validation_split": 0.0, "steps": number, "output": f"{folder}/run"})
        for redirected in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirected(io.StringIO()))
        kind = device_of(config).type
        before = memory_of_tensors(kind)
        trainer = _Steps(config, *assemble_in_turn(config))
        built = memory_since(before, kind)
        held = bytes_alive(built)
        with contextlib.ExitStack() as recording:
            recorded = recording.enter_context(recording_peak(trainer.device))

            def after_step() -> None:
                if len(ends) == RECORDED - 1:
                    recording.close()
                ends.append(time.perf_counter())

            if trainer.run(after_step).stopped:
                raise KeyboardInterrupt
        # On a CPU, what was freed, such as the whole weights of a model in parts, does not lower what is recorded.
        held = bytes_alive(built) if kind == "cpu" else held
    seconds = statistics.median(end - begin for begin, end in pairwise(ends[RECORDED - 1 :]))
    found: list[Trial] = of_all_processes(Trial(seconds, held + recorded.peak_bytes), "hvd_ckpt.trial")
    return Trial(*map(max, zip(*found)))


def compared(
    candidates: Sequence[Mapping[str, Any]],
    unrecorded: Sequence[int],
    memory: int,
    say: Callable[[Mapping[str, Any]], None],
    steps: int = 6,
) -> list[Trial | str]:
    """Trials of several settings in turn: of each the least seconds and the highest peak, or why it does not run. Collective.

    A peak is that of tensors and ``unrecorded`` bytes beside them. Other work on a machine makes a step slower, never faster. After
    each round, the faster half of those that stay within ``memory`` is tried again. Ctrl-C or SIGTERM ends the trials, and
    those that have ended count.
    """
    found: dict[int, Trial] = {}
    refused: dict[int, str] = {}
    start = time.perf_counter()
    with temporary_folder() as plans, contextlib.suppress(KeyboardInterrupt):
        running = list(range(len(candidates)))
        for rounds in range(ROUNDS):
            for number in running[:: -1 if rounds % 2 else 1]:
                say(candidates[number])
                try:
                    tried = trial(candidates[number], steps, plans)
                except (ValueError, *FATAL_ERRORS) as error:
                    refused[number] = str(error)
                except (torch.OutOfMemoryError, hvd.HorovodInternalError, StageFailed):
                    refused[number] = OUT_OF_MEMORY
                else:
                    seconds, peak = found.get(number, tried)
                    peak = max(peak, tried.peak + unrecorded[number])
                    found[number] = Trial(min(seconds, tried.seconds), peak)
                if refused.get(number) == OUT_OF_MEMORY and current().size > 1:
                    _start_anew()
            within = [number for number in running if number not in refused and found[number].peak <= memory]
            running = sorted(within, key=lambda number: found[number].seconds)
            del running[max(LEAST, len(within) // 2) :]
            late = of_first_process(time.perf_counter() - start > SECONDS, "hvd_ckpt.trial.late")
            if late or len(running) < 2:
                break
    results: dict[int, Trial | str] = {**found, **refused}
    return [results.get(number, NOT_TRIED) for number in range(len(candidates))]


def _start_anew() -> None:
    """Starts Horovod again after an error that a rank may be alone with: where its links end, others wait for it no longer."""
    gc.collect()  # requests of messages, which hold connections
    if (link := current().link) is not None:
        link.leave(OUT_OF_MEMORY)
    hvd.shutdown()
    runtime.init()
