"""Fault plans: from a seed, which ranks or launcher get which signal, and when. The same seed gives the same plan.

The number of ranks and the controller alternate with the seed, so that consecutive seeds are spread evenly; the rest is random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ALL", "LAUNCHER", "RUNNING", "SNAPSHOT", "START", "FaultPlan", "Kill", "draw_plan"]

_T = TypeVar("_T")

ALL, LAUNCHER = "all ranks", "launcher"
RUNNING, SNAPSHOT, START = "step", "snapshot", "start"
NUMBER_OF_KILLS = {1: 0.65, 2: 0.3, 3: 0.05}
WHO = {"one": 0.5, ALL: 0.25, LAUNCHER: 0.25}
SIGNALS = {
    "ranks": {"SIGKILL": 0.8, "SIGTERM": 0.1, "SIGINT": 0.1},
    "launcher": {"SIGKILL": 0.5, "SIGTERM": 0.3, "SIGINT": 0.2},
}
WHEN = {RUNNING: 0.6, SNAPSHOT: 0.25, START: 0.15}
LONGEST_START = 6.0  # seconds
LONGEST_DELAY = {RUNNING: 0.1, SNAPSHOT: 0.01, START: 0.0}  # seconds


@dataclass(frozen=True)
class Kill:
    """One signal.

    Attributes:
        who: ``rank 1``, ``all ranks`` or ``launcher``.
        signal: its name.
        when: ``step``: when the log contains the step ``at``; ``snapshot``: when a snapshot is being written at that step or later;
            ``start``: ``at`` seconds after the launch.
        at: a step or seconds.
        delay: seconds after that.
    """

    who: str
    signal: str
    when: str
    at: float
    delay: float


@dataclass(frozen=True)
class FaultPlan:
    """The kills of one run; after each the run is started again.

    Attributes:
        seed: the plan follows from it.
        size: number of ranks.
        controller: starts the ranks.
        kills: one for each launch but the last, unless the run ends before.
    """

    seed: int
    size: int
    controller: str
    kills: tuple[Kill, ...]


def draw_plan(seed: int, sizes: Sequence[int], controllers: Sequence[str], steps: int) -> FaultPlan:
    """The plan of a seed.

    Args:
        sizes, controllers: to choose from.
        steps: of the whole run, at least 4.
    """
    generator = random.Random(seed)
    size = sizes[seed % len(sizes)]
    controller = controllers[seed // len(sizes) % len(controllers)]
    moments = sorted(generator.sample(range(1, steps), _one_of(generator, NUMBER_OF_KILLS)))
    return FaultPlan(seed, size, controller, tuple(_kill(generator, size, step) for step in moments))


def _kill(generator: random.Random, size: int, step: int) -> Kill:
    who = _one_of(generator, WHO)
    signal = _one_of(generator, SIGNALS["launcher" if who == LAUNCHER else "ranks"])
    when = _one_of(generator, WHEN)
    at = generator.uniform(0, LONGEST_START) if when == START else step
    rank = generator.randrange(size)
    delay = generator.uniform(0, LONGEST_DELAY[when])
    return Kill(f"rank {rank}" if who == "one" else str(who), signal, when, round(at, 3), round(delay, 4))


def _one_of(generator: random.Random, weights: dict[_T, float]) -> _T:
    return generator.choices(list(weights), list(weights.values()))[0]
