"""A seed to a disturbed run: which ranks or launcher get which signal, and when. The same seed is the same run.

The number of ranks and the controller go round with the seed, so that consecutive seeds are spread evenly; the rest is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ALL", "LAUNCHER", "RUNNING", "SNAPSHOT", "START", "Disturbance", "Kill", "draw"]

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
        when: ``step``: when the step ``at`` is in the log; ``snapshot``: when a snapshot is being written at that step or later;
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
class Disturbance:
    """A run that is to be killed; after each kill it is started again.

    Attributes:
        seed: that it was drawn from.
        size: number of ranks.
        controller: what starts the ranks.
        kills: one for each launch but the last, unless the run ends before.
    """

    seed: int
    size: int
    controller: str
    kills: tuple[Kill, ...]


def draw(seed: int, sizes: Sequence[int], controllers: Sequence[str], steps: int) -> Disturbance:
    """The run of a seed.

    Args:
        sizes, controllers: to choose from.
        steps: of the whole run, at least 4.
    """
    random_ = random.Random(seed)
    size = sizes[seed % len(sizes)]
    controller = controllers[seed // len(sizes) % len(controllers)]
    count = _one_of(random_, NUMBER_OF_KILLS)
    moments = sorted(random_.sample(range(1, steps), count))
    return Disturbance(seed, size, controller, tuple(_kill(random_, size, step) for step in moments))


def _kill(random_: random.Random, size: int, step: int) -> Kill:
    who = _one_of(random_, WHO)
    signal = _one_of(random_, SIGNALS["launcher" if who == LAUNCHER else "ranks"])
    when = _one_of(random_, WHEN)
    at = random_.uniform(0, LONGEST_START) if when == START else step
    rank = random_.randrange(size)
    delay = random_.uniform(0, LONGEST_DELAY[when])
    return Kill(f"rank {rank}" if who == "one" else str(who), signal, when, round(at, 3), round(delay, 4))


def _one_of(random_: random.Random, weights: dict[_T, float]) -> _T:
    return random_.choices(list(weights), list(weights.values()))[0]
