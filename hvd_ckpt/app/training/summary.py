"""The summary of a run before its first step."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import horovod.torch as hvd
import torch

from hvd_ckpt.app.training.config import Config
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.runtime import controller
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.utils.text import show_bytes

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer

DEFAULT_DATA = {
    "tokens": "the standard library's source",
    "images": "scikit-learn's digits",
    "volumes": "synthetic ellipsoids",
}
OF_A_START = ("resume", "output", "dry_run")  # settings that say how a run begins
SAID = (  # settings that lines of the summary say
    "model", "data", "precision", "batch", "accumulate", "steps", "epochs", "optimizer", "lr", "schedule",
)  # fmt: skip


class DryRun(Exception):
    """The configuration asks for the summary of the run alone."""


def print_summary(trainer: Trainer, resumed: Snapshot | None) -> None:
    """Prints on rank 0 what a run is about to do, and what has changed since the snapshot from which it resumes. Raises DryRun on
    every rank if the configuration asks for nothing else."""
    config = trainer.config
    if current().number == 0:
        objective, train, test = trainer.objective, trainer.train, trainer.test
        taken, steps = trainer.progress.step, trainer.steps
        parameters = list(trainer.model.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        size = sum(parameter.nbytes for parameter in parameters)
        units, unit = objective.units(train.batch([0], [0])), objective.unit
        # Samples that a program hands over have no name in the settings; those of this package have a default.
        default = DEFAULT_DATA.get(unit) if type(train).__module__.startswith("hvd_ckpt.") else None
        source = config.data or default or type(train).__name__
        samples = config.samples_of_step(hvd.size())
        each = "" if units == 1 else f", {samples * units:,} {unit}"
        owner = "on each replica" if config.in_stages else "on each rank"
        if config.replicas is not None:
            owner = f"of each of {config.replicas} replicas"
        split = "" if config.accumulate == 1 else f" in {config.accumulate} micro-batches"
        given = config.model_dump(exclude_defaults=True, exclude={*SAID, *OF_A_START})
        over = f" over {controller()}" if current().size > 1 else ""
        lines = {
            "model": f"{config.model}: {count:,} parameters, {show_bytes(size)}; {config.precision}",
            "data": f"{source}: {len(train):,} samples to train on, {len(test or ()):,} to evaluate on",
            "step": f"{config.batch} samples {owner}{split}: {samples:,} samples{each}",
            "steps": f"{steps - taken:,} ({(steps - taken) * samples / len(train):.3g} epochs); {config.optimizer}, learning rate "
            f"{config.lr:g}, {config.schedule}",
            "set": "; ".join(f"{name} {value}" for name, value in given.items()) or "no other setting",
            "ranks": f"{current().size}{over} on {trainer.device}, CPU threads of each: {torch.get_num_threads()}",
            "folder": str(trainer.folder),
        }
        if taken:
            lines["steps"] += f"; resumes after step {taken:,} of {steps:,}"
        if resumed is not None and (changes := _changes(config, resumed)):
            lines["changed"] = "; ".join(changes)
        text = "\n".join(f"{name:<7} {line}" for name, line in lines.items())
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
    if config.dry_run:
        raise DryRun


def _changes(config: Config, resumed: Snapshot) -> list[str]:
    """What is other than in the run that wrote a snapshot: ranks, samples of a step, settings."""
    then = Config.make(resumed.replicated["config"])
    now, before = (
        {"ranks": ranks, "samples of a step": settings.samples_of_step(replicas), **settings.as_dict()}
        for settings, ranks, replicas in (
            (config, current().size, hvd.size()),
            (then, resumed.manifest.ranks, resumed.manifest.replicas),
        )
    )
    hints = {"samples of a step": f"; --global-batch {before['samples of a step']} keeps them"}
    return [
        f"{name} {_shown(now[name])} (was {_shown(before[name])}{hints.get(name, '')})"
        for name in now
        if now[name] != before[name] and name not in OF_A_START
    ]


def _shown(value: object) -> str:
    return "none" if value is None or value == "" else str(value)
