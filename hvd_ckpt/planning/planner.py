"""The planner: from a model, a batch and a budget to a plan, in the steps profile, solve, measure, correct.

The profile predicts the peak of a plan. Each plan is also measured before it is returned. If it needs more memory than
predicted, the chain is solved again for a smaller budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.blocks import check_called
from hvd_ckpt.planning.budget import MIN_SLOWDOWN, Budget, BudgetError, Given, parse_budget
from hvd_ckpt.planning.chain import Block, Choice, Item, Solution, all_kept, bottleneck
from hvd_ckpt.planning.inputs import in_words
from hvd_ckpt.planning.plan import Cost, Plan, applied, sample_shapes
from hvd_ckpt.planning.policy import without_policies
from hvd_ckpt.planning.profile import FITS, Profile
from hvd_ckpt.planning.solver import Solver
from hvd_ckpt.planning.step import Sample, Step, Timeline
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.measure import undisturbed
from hvd_ckpt.utils.memory import free_memory
from hvd_ckpt.utils.text import show_bytes

_CORRECTIONS = 5
_TIMED = 3  # steps at most of one plan
_TIMED_SECONDS = 0.4  # after which no further step is timed: longer steps vary less
_OUT_OF_MEMORY = 1 << 63  # the peak of a step that ran out of memory: larger than every budget


class _Tried(NamedTuple):
    """A schedule with its measured peak and its memory over time."""

    solution: Solution
    peak: int
    timeline: Timeline


class Layout(Protocol):
    """Parts of a model on several processes, such as the stages of :class:`hvd_ckpt.StageLayout`."""

    def blocks_of(self, model: nn.Module) -> list[str]:
        """Names of the blocks, of which each part has some."""

    def plan(
        self,
        chain: Sequence[Block],
        blocks: Sequence[nn.Module],
        budget: Budget,
        device: torch.device,
        plan_of: Callable[..., Plan],
    ) -> Plan:
        """The plan of a measured chain, in which each part fits the budget."""


class Planner:
    """Plans for one model and one batch, from one profile.

    Takes the arguments of :func:`plan`. The model is left unchanged.

    Args:
        say: called with a line of text for each measurement.

    Attributes:
        chain: the measured chain, with a pseudo-block at each end.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        say: Callable[[str], None] = lambda text: None,
        blocks: Sequence[str] | None = None,
        autocast: torch.dtype | None = None,
        chunk_head: bool = True,
    ) -> None:
        self._step = Step(model, Sample(args, kwargs or {}, loss), autocast)
        self._sample = sample_shapes(args, kwargs or {})
        self._say = say
        self._notes: list[str] = []
        self.chain: list[Block] = []
        self._tried: dict[tuple[Item, ...], _Tried] = {}
        self._kept: _Tried | None = None  # without recomputation
        with self._measuring():
            self._step.note_written()
        # Entered anew: on entry it decides what it will restore, and that includes the parameters that were found to be written.
        with self._measuring():
            self.profile = Profile(self._step, say, blocks, chunk_head)
            self._calibrate()

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """A context for steps of the model, which has no plan meanwhile; afterwards all is as before."""
        model = self._step.model
        with without_policies(model), undisturbed(model, self._step.device), verifying("never"):
            yield

    @property
    def baseline(self) -> Cost:
        """The predicted cost without recomputation."""
        return _cost(all_kept(self.chain))

    @property
    def smallest(self) -> Cost:
        """The predicted cost of the plan with the smallest peak."""
        return _cost(self._solver.smallest)

    @functools.cached_property
    def _solver(self) -> Solver:
        return Solver(self.chain)

    def plan(self, budget: Given = None) -> Plan:
        """The fastest plan whose peak stays within ``budget``; arguments and errors are those of :func:`plan`."""
        budget = parse_budget(budget)
        with self._measuring():
            # The loop ends: the first failure removes all segments, the next
            # one all recomputation. Without recomputation, an error is raised.
            while True:
                self._say("solving")
                limit, refused, problem = self._limit(budget), None, None
                try:
                    try:
                        tried = self._fastest(limit)
                    except BudgetError as error:
                        tried = self._fastest(error.smallest)
                        if budget.kind == "min":  # it needs a little more than was predicted
                            limit = error.smallest
                        else:
                            refused = error
                except Exception as error:
                    if isinstance(error, BudgetError) or not self._recomputes:
                        raise
                    problem = f"fails ({in_words(error)})"
                else:
                    if self._recomputes:
                        self._say("checking the plan")
                        problem = self.profile.problem(tried.solution.items, self._kept is not None)
                if problem is None:
                    break
                self._recompute_less(problem)
            plan = self._finished(limit, tried)
            if refused is not None:
                refused.nearest = plan
                raise refused
            return plan

    @property
    def _recomputes(self) -> bool:
        """Whether any block has more than one choice or may join a segment."""
        return any(len(block.choices) > 1 or block.joins_next for block in self.chain)

    def _recompute_less(self, problem: str) -> None:
        """Removes all segments from the search, or all recomputation from a search without segments. Notes the problem."""
        if any(block.joins_next for block in self.chain):
            self._notes.append(f"There are no segments of blocks: a step with them {problem}.")
            self.chain = [dataclasses.replace(block, joins_next=False) for block in self.chain]
        else:
            self._notes.append(f"All blocks are kept whole: a step that recomputes some {problem}.")
            self.chain = [block.only(1) for block in self.chain]
        for name in ("_solver", "_unlimited"):
            self.__dict__.pop(name, None)

    def plan_parts(self, layout: Layout, budget: Given) -> Plan:
        """The plan for parts of the model on several processes, each of which fits ``budget``.

        As of :func:`plan` with a layout: predicted and not measured. The blocks of this planner are ``layout.blocks_of(model)``.
        """
        self._say("solving")
        blocks = self.profile.blocks
        check_called(self._step.model, blocks)

        def alone(extra: int, choice: Choice) -> dict[str, Any]:
            return {"backward_peak": choice.backward_peak - extra, "casts": 0}

        pairs = zip(self.chain, [0, *self.profile.waiting, 0])
        chain = [block.with_costs(functools.partial(alone, extra)) for block, extra in pairs]
        modules = [self._step.model.get_submodule(block.members[0]) for block in blocks]

        def make(choices: Sequence[int], **facts: Any) -> Plan:
            return self.profile.plan_of(self.profile.without_segments(choices), sample=self._sample, **facts)

        return layout.plan(chain, modules, parse_budget(budget), self._step.device, make)

    def _finished(self, limit: int | None, tried: _Tried) -> Plan:
        """The plan of a schedule with its measured time and with its facts."""
        self._say("timing the plan")
        times = [self._seconds(tried)]
        while len(times) < _TIMED and sum(times) < _TIMED_SECONDS:
            times.append(self._seconds(tried))
        timelines = {"after": tried.timeline}
        if self._kept is not None:
            timelines["before"] = self._kept.timeline
        return self.profile.plan_of(
            tried.solution.items,
            sample=self._sample,
            notes=(*self.profile.described(), *self._notes),
            budget=limit,
            predicted=_cost(tried.solution),
            measured=Cost(tried.peak, statistics.median(times)),
            baseline=self.baseline,
            smallest=self.smallest,
            frontier=tuple(map(_cost, self._solver.frontier())),
            timelines=timelines,
        )

    def _limit(self, budget: Budget) -> int | None:
        if budget.kind == "min":
            longest, points = MIN_SLOWDOWN * self.baseline.seconds, self._solver.frontier()
            quick = [point for point in points if point.seconds <= longest]
            return min(point.peak for point in quick or points)
        return budget.bytes(self.baseline.peak_bytes, self._step.device)

    def _fastest(self, limit: int | None) -> _Tried:
        """The fastest schedule whose measured peak stays within the limit."""
        if limit is None or (self._kept is not None and self._kept.peak <= limit):
            return self._unlimited
        return self._within(limit)

    @functools.cached_property
    def _unlimited(self) -> _Tried:
        """The faster one of the solver's fastest schedule and no recomputation.

        Both are timed, since predictions cannot rank close times.
        """
        fastest, kept = self._try(self._solver.fastest), self._kept
        if kept is None and fastest.peak == _OUT_OF_MEMORY:
            return self._within(free_memory(self._step.device))
        if kept is None or fastest is kept:
            return fastest
        if fastest.peak > kept.peak:
            return kept
        fastest_times, kept_times = zip(
            *((self._seconds(fastest), self._seconds(kept)) for _ in range(_TIMED))
        )
        # Other work makes a step slower, never faster.
        return fastest if min(fastest_times) < min(kept_times) else kept

    def _seconds(self, tried: _Tried) -> float:
        """Seconds of a step with the schedule."""
        with applied(self._step.model, self.profile.plan_of(tried.solution.items)):
            return self._step.seconds()

    def _within(self, limit: int) -> _Tried:
        """The solver's schedule for the limit, corrected until it keeps the limit when measured."""
        # The loop corrects the budget of the solver, not the schedule:
        #
        #     measured peak over the limit    the prediction was too low: lower the target by the excess, at least by 0.5 %
        #     measured peak within the limit  the prediction was too high: raise the target by the difference, so that the
        #                                     solver may keep more and take less time, unless the difference is below 2 %
        #
        # A schedule over the limit ends the search once another has been within it, so the target does not oscillate.
        target = limit
        best: _Tried | None = None
        for _ in range(_CORRECTIONS):
            solution = self._solver.solve(target)
            if solution is None:
                break
            tried = self._try(solution)
            if tried.peak <= limit:
                if best is None or solution.seconds < best.solution.seconds:
                    best = tried
                spared = solution.peak - tried.peak
                if spared <= 0.02 * limit:
                    break
                target = limit + spared
            elif best is not None:
                break
            else:
                # A step that ran out of memory has no measured excess: assume an eighth.
                over = solution.peak // 8 if tried.peak == _OUT_OF_MEMORY else tried.peak - limit
                target = min(target, solution.peak) - max(over, limit // 200)
        if best is None:
            best = self._try(self._solver.smallest)
            if best.peak > limit:
                place = self._place(bottleneck(self.chain, best.solution.items))
                if best.peak == _OUT_OF_MEMORY:
                    raise BudgetError(
                        f"No plan stays within a budget of {show_bytes(limit)}: {self._step.device} has no room for the plan with "
                        f"the smallest peak, {show_bytes(best.solution.peak)} as predicted, set by {place}. Give a smaller batch.",
                        best.solution.peak,
                    )
                share = math.ceil(100 * best.peak / self.baseline.peak_bytes) / 100
                raise BudgetError(
                    f"No plan stays within a budget of {show_bytes(limit)}: the smallest peak is {show_bytes(best.peak)}, set by "
                    f"{place}. Give a larger budget, from {share:g}x or 'min', or a smaller batch.",
                    best.peak,
                )
        return best

    def _place(self, block: int) -> str:
        if block == 0:
            return "what runs before the first block"
        if block == len(self.chain) - 1:
            return "what runs behind the last block (head and loss)"
        return f"block '{self.profile.blocks[block - 1].members[0]}'"

    def _calibrate(self) -> None:
        """Measures a step without recomputation, and corrects the seconds of all choices by it.

        The step takes longer than the sum of its blocks, since memory that is touched for the first time costs time. The
        difference is spread over the bytes that the blocks keep.
        """
        self.chain = self.profile.chain
        solution = all_kept(self.chain)
        if solution.peak > FITS * free_memory(self._step.device):
            return  # it might not fit
        self._say("measuring a step without recomputation")
        kept = _Tried(solution, *self._peak())
        if kept.peak == _OUT_OF_MEMORY:
            return
        seconds = min(self._step.seconds() for _ in range(2))
        held = sum(block.choices[0].kept for block in self.chain[1:-1])
        rate = max(seconds - solution.seconds, 0.0) / max(held, 1)
        self.chain = [
            block.with_costs(lambda choice: {"seconds": choice.seconds + rate * choice.kept})
            for block in self.chain
        ]
        self._kept = self._tried[solution.items] = kept._replace(solution=all_kept(self.chain))

    def _try(self, solution: Solution) -> _Tried:
        """Measures the peak of a schedule; a second call returns the first result."""
        if solution.items not in self._tried:
            self._say(f"measuring a plan that should peak at {show_bytes(solution.peak)}")
            with applied(self._step.model, self.profile.plan_of(solution.items)):
                self._tried[solution.items] = _Tried(solution, *self._peak())
        return self._tried[solution.items]

    def _peak(self) -> tuple[int, Timeline]:
        """The measured peak of a step and its memory over time; ``_OUT_OF_MEMORY`` if the step runs out of memory."""
        try:
            return self._step.peak()
        except torch.OutOfMemoryError:
            pass
        free_failed_step()
        return _OUT_OF_MEMORY, ()


def free_failed_step() -> None:
    """Frees the memory of a failed step."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _cost(solution: Solution) -> Cost:
    return Cost(solution.peak, solution.seconds)
