"""A few steps of training as configured, which are measured: :func:`trial`, and :func:`compared` for several in turn."""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import horovod.torch as hvd

from hvd_ckpt.app.training.build import assemble_in_turn
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.processes import runtime
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import of_all_processes, of_first_process
from hvd_ckpt.utils.memory import bytes_since, memory_of_tensors, recording_peak

RECORDED = 3  # the first steps, which recording slows down: a first one allocates what later ones use again
ROUNDS = 4  # of trials in turn at most
SECONDS = 45.0  # of all trials, after which no further round begins
OTHERS = ("epochs", "eval_every", "patience", "snapshot_every")  # settings of what is not in a step


class Trial(NamedTuple):
    """Seconds of a step and bytes of its peak, of the rank that needs most."""

    seconds: float
    peak: int


def trial(settings: Mapping[str, Any], steps: int = 6) -> Trial:
    """Trains some steps with settings of ``hvd-ckpt train``. Collective; starts Horovod anew where it has other stages or parts.

    Args:
        steps: that are timed, after those of which the peak is recorded.

    Raises:
        ConfigError: the settings do not fit; raised on every rank.
    """
    stages, tensor = settings.get("pipeline", 1), settings.get("tensor", 1)
    if hvd.is_initialized() and (current().stages, current().tensor) != (stages, tensor):
        hvd.shutdown()
    if not hvd.is_initialized():
        runtime.init(stages=stages, tensor=tensor)
    folder = of_first_process(tempfile.mkdtemp(prefix="hvd_ckpt-trial-"), "hvd_ckpt.trial.folder")
    # The trainer calls after each step but the last.
    others = {name: value for name, value in settings.items() if name not in OTHERS}
    number = RECORDED + steps + 1
    config = Config.make({**others, "validation_split": 0.0, "steps": number, "output": f"{folder}/run"})
    ends: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for redirected in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirected(io.StringIO()))
        before = memory_of_tensors()
        trainer = Trainer(config, *assemble_in_turn(config))
        held = bytes_since(before)
        with contextlib.ExitStack() as recording:
            memory = recording.enter_context(recording_peak(trainer.device))

            def after_step() -> None:
                if len(ends) == RECORDED - 1:
                    recording.close()
                ends.append(time.perf_counter())

            trainer.run(after_step)
    seconds = statistics.median(end - begin for begin, end in pairwise(ends[RECORDED - 1 :]))
    found: list[Trial] = of_all_processes(Trial(seconds, held + memory.peak_bytes), "hvd_ckpt.trial")
    return Trial(max(each.seconds for each in found), max(each.peak for each in found))


def compared(
    candidates: Sequence[Mapping[str, Any]], say: Callable[[Mapping[str, Any]], None]
) -> list[Trial | str]:
    """Trials of several settings in turn: of each the least seconds and the highest peak, or why it does not run. Collective.

    Other work on a machine makes a step slower, never faster. Ctrl-C ends the trials, and those that have ended count.
    """
    found: list[list[Trial]] = [[] for _ in candidates]
    refused: dict[int, str] = {}
    start = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):
        for rounds in range(1, ROUNDS + 1):
            for number in sorted(range(len(candidates)), reverse=rounds % 2 == 0):
                if number in refused:
                    continue
                say(candidates[number])
                try:
                    found[number].append(trial(candidates[number]))
                except ValueError as error:
                    refused[number] = str(error)
            taken = time.perf_counter() - start
            if of_first_process(taken * (rounds + 1) / rounds > SECONDS, "hvd_ckpt.trial.rounds"):
                break
    return [
        Trial(min(each.seconds for each in trials), max(each.peak for each in trials))
        if trials
        else refused.get(number, "it was not tried")
        for number, trials in enumerate(found)
    ]
