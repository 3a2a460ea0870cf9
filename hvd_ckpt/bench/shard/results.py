"""What the ranks of all jobs say of each contender, and what follows from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_ckpt.bench.harness.stats import Quartiles, quartiles, ratios
from hvd_ckpt.bench.shard.contenders import OURS, Contender, rivals
from hvd_ckpt.bench.shard.job import Answer, Findings
from hvd_ckpt.bench.shard.theory import shared_bytes, state_bytes

__all__ = ["MIB", "Result", "Results", "Verdict"]

MIB = 1 << 20
WANTED_STATE = 1.05
WANTED_TIME = 0.95
WANTED_LOSS = 1e-4
ITEM = 4  # bytes of a parameter


@dataclass
class Result:
    """One contender.

    Attributes:
        contender: who.
        ranks: what each rank has found out, in rank order; empty if its job has failed.
        failure: why there is not everything, in one line.
    """

    contender: Contender
    ranks: list[Findings] = field(default_factory=list)
    failure: str | None = None

    @property
    def title(self) -> str:
        """For people."""
        return self.contender.title + ", recomputed" * self.contender.recompute

    @property
    def seconds(self) -> list[float]:
        """Of each round, on the slowest rank."""
        return [max(times) for times in zip(*(found.seconds for found in self.ranks))]

    @property
    def step(self) -> Quartiles | None:
        """Seconds of a step over the rounds."""
        return quartiles(self.seconds) if self.seconds else None

    def most(self, attribute: str) -> int | None:
        """The greatest of all ranks' findings, if each has one."""
        found: int | None = self._of(attribute, max)
        return found

    def mean(self, attribute: str) -> float | None:
        """The mean of all ranks' findings, if each has one."""
        found: float | None = self._of(attribute, statistics.fmean)
        return found

    def _of(self, attribute: str, combine: Callable[[Iterable[Any]], Any]) -> Any:
        values = [getattr(found, attribute) for found in self.ranks]
        return combine(values) if values and None not in values else None

    @property
    def states(self) -> int | None:
        """Bytes of parameters, gradients and optimizer state in memory, on the rank that holds the most."""
        if not self.ranks or not self.ranks[0].parameters:
            return None
        return max(found.parameters + found.gradients + found.state for found in self.ranks)

    def kinds(self) -> dict[str, float]:
        """Mean bytes of a rank at the peak of a step, by kind. What is neither model state nor activations is a buffer: buckets,
        parameters gathered for a while, and what libraries hold."""
        if self.states is None:
            return {}
        held = {name: self.mean(name) or 0.0 for name in ("parameters", "gradients", "state")}
        peak, activations = self.mean("peak"), self.mean("activations") or 0.0
        passing = max(0.0, (peak - sum(held.values())) if peak is not None else activations)
        activations = min(activations, passing)
        return {**held, "buffers": passing - activations, "activations": activations}

    def loss_difference(self, reference: Result) -> float | None:
        """The greatest difference of a rank's loss in a step to another contender's."""
        pairs = [zip(one.losses, other.losses) for one, other in zip(self.ranks, reference.ranks)]
        return max((abs(one - other) for pair in pairs for one, other in pair), default=None)


@dataclass(frozen=True)
class Verdict:
    """Whether a figure is what was wanted."""

    what: str
    met: bool


@dataclass
class Results:
    """Everyone.

    Attributes:
        size: number of ranks.
        passes: micro-batches of a step.
        all: in the order of the tables.
        elements: of all parameters; ``threads``: of each rank.
        failure: why nobody's time is known, in one line.
    """

    size: int
    passes: int
    all: list[Result] = field(default_factory=list)
    elements: int = 0
    threads: int = 0
    failure: str | None = None

    def take(self, answers: Sequence[Answer], names: Iterable[str], *, memory: bool, time: bool) -> None:
        """Takes in what a job has found out about contenders: of ``memory``, of ``time``, or of both."""
        self.elements, self.threads = answers[0].elements, answers[0].threads
        for result in self.all:
            if result.contender.name not in names:
                continue
            found = [answer.findings[result.contender.name] for answer in answers]
            failures = [one.failure for one in found if one.failure is not None]
            if failures:
                result.failure = failures[0]
            elif memory:
                result.ranks = found
            elif time:
                result.ranks = [
                    dataclasses.replace(before, seconds=now.seconds, losses=now.losses)
                    for before, now in zip(result.ranks, found)
                ]

    @property
    def sound(self) -> bool:
        """Whether this library has done all that it was asked for."""
        return self.failure is None and all(one.failure is None for one in self.all if one.contender.ours)

    @property
    def reference(self) -> Result | None:
        """This library's first result, whose losses the others must follow."""
        return next((one for one in self.all if one.contender.engine == OURS and one.ranks), None)

    def best_rival(self, result: Result) -> Result | None:
        """The peer that does the same in the least time."""
        names = [one.name for one in rivals(result.contender, [other.contender for other in self.all])]
        timed = [(one.step.median, one) for one in self.all if one.contender.name in names and one.step]
        return min(timed, key=lambda pair: pair[0])[1] if timed else None

    def of_best_rival(self, result: Result) -> Quartiles | None:
        """The time of a step as a ratio to the best peer's of the same round, over the rounds."""
        rival = self.best_rival(result)
        values = ratios(result.seconds, rival.seconds) if rival is not None else []
        return quartiles(values) if values else None

    def states_of_theory(self, result: Result) -> float | None:
        """Bytes of model states as a ratio to those there should be."""
        contender = result.contender
        wanted = state_bytes(contender.stage, self.size, contender.offload) * self.elements
        return None if result.states is None or not wanted else result.states / wanted

    def model_volumes(self, result: Result) -> float | None:
        """Counted bytes of a step as a multiple of gathering the model once."""
        counted, once = result.mean("counted"), shared_bytes(self.elements * ITEM, self.size)
        return None if counted is None or not once else counted / once

    def samples_per_second(self, result: Result) -> float | None:
        """Over all ranks."""
        return None if result.step is None else self.size * self.passes / result.step.median

    def loss_difference(self, result: Result) -> float | None:
        """To the reference, as :meth:`Result.loss_difference`."""
        return None if self.reference is None else result.loss_difference(self.reference)

    def verdicts(self) -> list[Verdict]:
        """Every figure that was wanted."""
        found = [*self._losses(), *self._messages()]
        for one in self.all:
            if not one.contender.ours:
                continue
            states, time, rival = self.states_of_theory(one), self.of_best_rival(one), self.best_rival(one)
            if states is not None:
                text = f"{one.title}: model states are {states:.3f} of theory, wanted at most {WANTED_STATE}"
                found.append(Verdict(text, states <= WANTED_STATE))
            if time is not None and rival is not None:
                text = f"{one.title}: {time.median:.3f} of the step of {rival.contender.title}, wanted at most {WANTED_TIME}"
                found.append(Verdict(text, time.median <= WANTED_TIME))
        return found

    def _losses(self) -> list[Verdict]:
        """Whether all train the same."""
        others = [(self.loss_difference(one), one.title) for one in self.all if one is not self.reference]
        told = [(difference, title) for difference, title in others if difference is not None]
        if not told or self.reference is None:
            return []
        worst, title = max(told)
        text = (
            f"losses follow those of {self.reference.title}, the furthest by {worst:.1e} ({title}), "
            f"wanted at most {WANTED_LOSS:.0e}"
        )
        return [Verdict(text, worst <= WANTED_LOSS)]

    def _messages(self) -> list[Verdict]:
        """Whether recomputation adds no message at stage 3."""
        counted = {one.contender: one.most("counted") for one in self.all if one.contender.ours and one.ranks}
        found = []
        for contender, sent in counted.items():
            other = counted.get(dataclasses.replace(contender, recompute=True))
            if contender.stage == 3 and not contender.recompute and sent is not None and other is not None:
                text = f"{contender.title}: sends {other} bytes in a step with recomputation and {sent} without, wanted the same"
                found.append(Verdict(text, other == sent))
        return found
