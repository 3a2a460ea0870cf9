"""The learning rate as a function of the step.

PyTorch's schedulers count their own calls, so they carry a state that snapshots must save, and their values come from
the value before, rounding included. A pure function of the step has no state: a run that resumes at step k has the
rate it would have had, from k alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_ckpt.names import unknown

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt", "step")


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up to ``lr``, then a decay.

    The decays: ``constant`` stays; ``linear`` and ``cosine`` (Loshchilov and Hutter, "SGDR", 2017, without restarts) fall
    to ``final`` times lr, reached where training ends; ``inverse-sqrt`` falls with one over the square root of the
    step (Vaswani et al., "Attention Is All You Need", 2017, scaled so that its top is lr); ``step`` is divided by 10
    at 50 % and at 75 % of all steps (as DenseNet, Huang et al., 2017, and nearly as ResNet, He et al., 2016). The last two stop
    falling at ``final`` times lr; ``constant`` has no use for it.

    Attributes:
        name: one of :data:`SCHEDULES`.
        lr: the highest rate, above 0.
        steps: of the whole training, at least 1.
        warmup: steps of the warm-up; the first has lr / warmup, the last lr.
        final: share of lr where training ends, from 0 to 1.

    Raises:
        ValueError: a name or a number that is none of those.
    """

    name: str
    lr: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(unknown("schedule", self.name, SCHEDULES))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"schedule '{self.name}': lr is {self.lr}: give a number above 0")
        if self.steps < 1:
            raise ValueError(f"schedule '{self.name}': steps is {self.steps}: give a whole number from 1")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"schedule '{self.name}': warmup is {self.warmup}: give a number of steps from 0 to all {self.steps}"
            )
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule '{self.name}': final is {self.final}: give a share of lr from 0 to 1")

    def rate(self, step: int) -> float:
        """The rate of the step that follows ``step`` finished ones: ``rate(0)`` is that of the first."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * self._share(step)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Sets :meth:`rate` in every group; a rate held in a tensor (as CUDA graphs need) is changed in place."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], (int, float)):
                group["lr"] = rate
            else:
                group["lr"].fill_(rate)

    def _share(self, step: int) -> float:
        if self.name == "constant":
            return 1.0
        if self.name == "inverse-sqrt":
            return max(math.sqrt(max(self.warmup, 1) / (step + 1)), self.final)
        if self.name == "step":
            drops = (2 * step >= self.steps) + (4 * step >= 3 * self.steps)
            return max(0.1**drops, self.final)
        gone = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        left = 1 - gone if self.name == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.final + (1 - self.final) * left
