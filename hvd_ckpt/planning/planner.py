"""From a model, a batch and a budget to a plan: profile, solve, measure, correct.

The profile predicts; the truth is a step with the plan applied. Each plan is measured before it is handed out; where
it needs more than was predicted, the chain is solved again with that much less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.blocks import check_called
from hvd_ckpt.planning.budget import MIN_SLOWDOWN, Budget, BudgetError, Given, parse_budget
from hvd_ckpt.planning.cache import cached, key_of
from hvd_ckpt.planning.candidates import PlanOptions
from hvd_ckpt.planning.chain import Block, Choice, Item, Run, Segment, Solution, bottleneck, simulate
from hvd_ckpt.planning.inputs import in_words
from hvd_ckpt.planning.plan import Cost, Plan, Timeline, applied, sample_shapes, thinned
from hvd_ckpt.planning.profile import FITS, Profile
from hvd_ckpt.planning.solver import Solver
from hvd_ckpt.planning.stages import PARAM_SCALE, Layout, StagePlanner, plan_stages
from hvd_ckpt.planning.step import Step, device_of
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.measure import undisturbed
from hvd_ckpt.utils.memory import free_memory
from hvd_ckpt.utils.text import show_bytes, talking

_CORRECTIONS = 5
_TIMED = 3  # steps
_SILENT_SECONDS = 10.0  # at the start, where nobody asked to be told
_OUT_OF_MEMORY = 1 << 63  # peak of a step that the device has no room for: above every budget


class _Tried(NamedTuple):
    """A schedule with its measured peak and its memory over time."""

    solution: Solution
    peak: int
    timeline: Timeline


class Planner:
    """Makes plans for one model and one batch; the profile is taken once.

    Arguments as of :func:`plan`. The model is left as it was.

    Args:
        say: is called with a line for each measurement.
        budget: of the first plan; one in bytes is refused early if what runs around the blocks needs more.
        options: of :class:`PlanOptions`.

    Raises:
        BudgetError: it is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        say: Callable[[str], None] = lambda text: None,
        budget: Given = None,
        **options: Any,
    ) -> None:
        given = PlanOptions(**options)
        self._step = Step(model, args, kwargs or {}, loss, given.autocast)
        if given.offload and self._step.device.type != "cuda":
            raise ValueError(
                "offload=True keeps activations in host memory, and the model is on the device "
                f"'{self._step.device}': move it to a GPU first, or leave offload out"
            )
        self._sample = sample_shapes(args, kwargs or {})
        self._say = say
        first = parse_budget(budget)
        limit = first.bytes(0, 0, self._step.device) if first.is_absolute else None
        self._notes: list[str] = []
        self._chain: list[Block] = []
        self._tried: dict[tuple[Item, ...], _Tried] = {}
        with undisturbed(model, self._step.device), verifying("never"):
            self._step.note_written()
        with undisturbed(model, self._step.device), verifying("never"):
            self.profile = Profile(self._step, given, say, limit)
            self._calibrate()

    @property
    def baseline(self) -> Cost:
        """The predicted cost without recomputation."""
        return _cost(self._all_kept)

    @property
    def _all_kept(self) -> Solution:
        items = tuple(Run(index, 0) for index in range(len(self._chain)))
        return Solution(items, *simulate(self._chain, items))

    @functools.cached_property
    def smallest(self) -> Cost:
        """The predicted cost of the plan with the smallest peak."""
        return _cost(self._solver.smallest)

    @functools.cached_property
    def _solver(self) -> Solver:
        return Solver(self._chain)

    @functools.cached_property
    def _points(self) -> list[Solution]:
        """Schedules on the Pareto frontier of peak and time, as predicted."""
        return self._solver.frontier()

    def plan(self, budget: Given = None) -> Plan:
        """The fastest plan whose peak stays within ``budget``.

        Args:
            budget: as in :func:`plan`.

        Raises:
            ValueError: the budget cannot be read.
            BudgetError: no plan stays within it; has the plan that comes nearest.
        """
        budget = parse_budget(budget)
        with undisturbed(self._step.model, self._step.device), verifying("never"):
            while True:
                self._say("solving")
                limit, found, refused = self._attempt(budget)
                problem = found if isinstance(found, str) else self._problem(found)
                if problem is not None or isinstance(found, str):
                    self._recompute_less(problem or "")
                    continue
                plan = self._finished(limit, found)
                if refused is not None:
                    refused.nearest = plan
                    raise refused
                return plan

    def _attempt(self, budget: Budget) -> tuple[int | None, _Tried | str, BudgetError | None]:
        """The limit, the fastest schedule within it (or what went wrong, in words), and the error if that is not within it."""
        limit = self._limit(budget)
        try:
            try:
                return limit, self._fastest(limit), None
            except BudgetError as error:
                if budget.kind == "min":  # it needs a little more than was predicted
                    return error.smallest, self._fastest(error.smallest), None
                return limit, self._fastest(error.smallest), error
        except (BudgetError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if not self._recomputes:
                raise
            return limit, f"fails ({in_words(error)})", None

    def _problem(self, tried: _Tried) -> str | None:
        """What is wrong with a step with that schedule, in words, or None."""
        self._say("checking the plan")
        problem = self.profile.problem(self._as_plan(tried.solution.items), self._kept is not None)
        return problem if self._recomputes else None

    @property
    def _recomputes(self) -> bool:
        """Whether there is anything to choose."""
        return any(len(block.choices) > 1 or block.joins_next for block in self._chain)

    def _recompute_less(self, problem: str) -> None:
        """Goes without segments, or else without any recomputation, because of what is wrong."""
        if any(block.joins_next for block in self._chain):
            self._notes.append(f"There are no segments of blocks: a step with them {problem}.")
            self._chain = [dataclasses.replace(block, joins_next=False) for block in self._chain]
        else:
            self._notes.append(f"All blocks are kept whole: a step that recomputes some {problem}.")
            self._chain = [block.only(1) for block in self._chain]
        for name in ("smallest", "_solver", "_points", "_unlimited"):
            self.__dict__.pop(name, None)

    def plan_stages(self, layout: Layout, budget: Given, param_scale: float) -> Plan:
        """The plan for pipeline stages with the shortest longest stage within ``budget`` for each. It is predicted, not measured.

        Args:
            layout: stages, micro-batches and schedule; the blocks of this planner are ``layout.blocks_of(model)``.
            budget, param_scale: as in :func:`plan`.

        Raises:
            ValueError: the budget cannot be read, or the model does not call each block once.
            BudgetError: no plan stays within it; has the plan that comes nearest.
        """
        self._say("solving")
        found = self.profile.found
        check_called(self._step.model, found)

        def alone(extra: int, choice: Choice) -> dict[str, Any]:
            return {"backward_peak": choice.backward_peak - extra, "casts": 0}

        pairs = zip(self._chain, [0, *self.profile.waiting, 0])
        chain = [block.with_costs(functools.partial(alone, extra)) for block, extra in pairs]
        planner = StagePlanner(chain, [block.modules[0] for block in found], layout, param_scale)
        make = functools.partial(self.profile.plan_of, sample=self._sample)
        return plan_stages(planner, parse_budget(budget), self._step.device, make)

    def _finished(self, limit: int | None, tried: _Tried) -> Plan:
        """The plan of a schedule, timed, with all that is known of it."""
        self._say("timing the plan")
        seconds = statistics.median(self._seconds(tried) for _ in range(_TIMED))
        timelines = {"after": thinned(tried.timeline)}
        if self._kept is not None:
            timelines["before"] = thinned(self._kept.timeline)
        return self._as_plan(
            tried.solution.items,
            sample=self._sample,
            notes=(*self.profile.described(), *self._notes),
            budget=limit,
            predicted=_cost(tried.solution),
            measured=Cost(tried.peak, seconds),
            baseline=self.baseline,
            smallest=self.smallest,
            frontier=tuple(map(_cost, self._points)),
            timelines=timelines,
        )

    def _limit(self, budget: Budget) -> int | None:
        if budget.kind == "min":
            longest = MIN_SLOWDOWN * self.baseline.seconds
            quick = [point for point in self._points if point.seconds <= longest]
            return min(point.peak for point in quick or self._points)
        return budget.bytes(self.baseline.peak_bytes, 0, self._step.device)

    def _fastest(self, limit: int | None) -> _Tried:
        """The fastest schedule that stays within the limit when measured."""
        if limit is None or (self._kept is not None and self._kept.peak <= limit):
            return self._unlimited
        return self._within(limit)

    @functools.cached_property
    def _unlimited(self) -> _Tried:
        """The faster one of the solver's fastest schedule and no recomputation: predictions do not tell close ones apart."""
        found, kept = self._try(self._solver.fastest), self._kept
        if kept is None and found.peak == _OUT_OF_MEMORY:
            return self._within(free_memory(self._step.device))
        if kept is None or found is kept:
            return found
        if found.peak > kept.peak:
            return kept
        found_times, kept_times = zip(*((self._seconds(found), self._seconds(kept)) for _ in range(_TIMED)))
        # Other work makes a step slower, never faster.
        return found if min(found_times) < min(kept_times) else kept

    def _seconds(self, tried: _Tried) -> float:
        """Seconds of a step with the schedule."""
        with applied(self._step.model, self._as_plan(tried.solution.items)):
            return self._step.seconds()

    def _within(self, limit: int) -> _Tried:
        """The solver's schedule for the limit, corrected until it keeps the limit when measured."""
        target = limit
        found: _Tried | None = None
        for _ in range(_CORRECTIONS):
            solution = self._solver.solve(target)
            if solution is None:
                break
            tried = self._try(solution)
            if tried.peak <= limit:
                if found is None or solution.seconds < found.solution.seconds:
                    found = tried
                spared = solution.peak - tried.peak  # by which the prediction was too careful
                if spared <= 0.02 * limit:
                    break
                target = limit + spared
            elif found is not None:
                break
            else:
                over = solution.peak // 8 if tried.peak == _OUT_OF_MEMORY else tried.peak - limit
                target = min(target, solution.peak) - max(over, limit // 200)
        if found is None:
            found = self._try(self._solver.smallest)
            if found.peak > limit:
                place = self._place(bottleneck(self._chain, found.solution.items))
                if found.peak == _OUT_OF_MEMORY:
                    raise BudgetError(
                        f"No plan stays within a budget of {show_bytes(limit)}: {self._step.device} has no room for the plan with "
                        f"the smallest peak, {show_bytes(found.solution.peak)} as predicted, set by {place}. Give a smaller batch.",
                        found.solution.peak,
                    )
                share = math.ceil(100 * found.peak / self.baseline.peak_bytes) / 100
                raise BudgetError(
                    f"No plan stays within a budget of {show_bytes(limit)}: the smallest peak is {show_bytes(found.peak)}, set by "
                    f"{place}. Give a larger budget, from {share:g}x or 'min', or a smaller batch.",
                    found.peak,
                )
        return found

    def _place(self, block: int) -> str:
        if block == 0:
            return "what runs before the first block"
        if block == len(self._chain) - 1:
            return "what runs behind the last block (head and loss)"
        return f"block '{self.profile.found[block - 1].members[0]}'"

    def _calibrate(self) -> None:
        """Measures a step without recomputation, where that surely fits, and charges the time that it takes beyond the sum of its
        blocks to the bytes that it keeps: memory that is touched for the first time costs time."""
        self._chain = self.profile.chain
        self._kept: _Tried | None = None  # without recomputation
        everything = self.baseline
        if everything.peak_bytes > FITS * free_memory(self._step.device):
            return
        self._say("measuring a step without recomputation")
        peak, timeline = self._peak()
        if peak == _OUT_OF_MEMORY:
            return
        seconds = min(self._step.seconds() for _ in range(2))
        kept = sum(block.choices[0].kept for block in self._chain[1:-1])
        rate = max(seconds - everything.seconds, 0.0) / max(kept, 1)
        self._chain = [
            block.with_costs(lambda choice: {"seconds": choice.seconds + rate * choice.kept})
            for block in self._chain
        ]
        solution = self._all_kept
        self._kept = self._tried[solution.items] = _Tried(solution, peak, timeline)

    def _try(self, solution: Solution) -> _Tried:
        """Measures the peak of a schedule, once."""
        if solution.items not in self._tried:
            self._say(f"measuring a plan that should peak at {show_bytes(solution.peak)}")
            with applied(self._step.model, self._as_plan(solution.items)):
                self._tried[solution.items] = _Tried(solution, *self._peak())
        return self._tried[solution.items]

    def _peak(self) -> tuple[int, Timeline]:
        """The measured peak of a step, and its memory over time; ``_OUT_OF_MEMORY`` where the device has no room for it."""
        try:
            return self._step.peak()
        except torch.OutOfMemoryError:
            pass
        _free_what_failed()
        return _OUT_OF_MEMORY, ()

    def _as_plan(self, items: Sequence[Item], **facts: Any) -> Plan:
        choices = [0] * len(self.profile.found)

        def number(item: Item) -> Any:
            if isinstance(item, Segment):
                return tuple(number(inner) for inner in item.items)
            choices[item.block - 1] = item.choice
            return item.block - 1

        _, *inner, behind = items  # what runs before and behind the blocks is in no segment
        assert isinstance(behind, Run)
        chunks = self.profile.head_costs[behind.choice].chunks
        return self.profile.plan_of(tuple(map(number, inner)), choices, chunks, **facts)


def plan(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    budget: Given = None,
    blocks: Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
    lossy: torch.dtype | None = None,
    chunk_head: bool = True,
    offload: bool = False,
    verbose: bool | None = None,
    stages: int | None = None,
    chunks: int | None = None,
    schedule: str = "1f1b",
    virtual_stages: int | None = None,
    param_scale: float = PARAM_SCALE,
    cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """Decides, block by block, what the forward pass of ``model`` keeps so that a training step fits ``budget`` and loses least
    time.

    With ``stages`` it also decides where a chain is cut into pipeline stages, together with what the blocks of each stage keep: the
    longest stage is as short as possible, and each stage fits ``budget`` with its own number of micro-batches in flight. The sample
    is then *one micro-batch*, and the plan is for ``hc.Pipeline(model, plan=plan)``. It is predicted from blocks that are measured
    on one process, so it can be made without stages.

    Args:
        model: any module with a chain of blocks in an ``nn.Sequential`` or ``nn.ModuleList``; on its device, in training mode.
        args, kwargs: a sample batch: the step is ``loss(model(*args, **kwargs)).backward()``.
        loss: from the model's output to one number; by default the output itself if it is one number, else its ``loss``
            attribute, else the sum of its tensors.
        budget: for the peak of a step above its start, with the gradients of the parameters already there. Bytes, or
            text: ``"6GiB"``; ``"0.3x"`` of the peak without recomputation; ``"80%"`` of the device's memory; ``"min"``, the
            smallest peak that does not double the time; None for the fastest plan at any memory.
        blocks: names of the modules that are the blocks (``"encoder.layer.*"`` for all children); by default they are found.
        autocast: the dtype, where the forward pass will run under :class:`torch.autocast`.
        lossy: ``torch.bfloat16`` or ``torch.float16``: kept tensors may be in that precision. Results then change, by about
            that rounding in the gradients.
        chunk_head: the cross entropy of a language model's head may be computed in chunks of rows (as by
            :func:`hvd_ckpt.chunked_cross_entropy`): results then equal to float32 rounding. False: they keep their bits. With
            ``stages`` it is never in chunks.
        offload: on a GPU, large tensors that a block keeps may be kept in host memory, as a third choice beside keeping and
            recomputing them. Results keep their bits.
        verbose: print progress on standard error, on rank 0; None to begin with that once planning has taken 10 seconds.
        stages: number of pipeline stages; the model is a chain of this library or an ``nn.Sequential``, and the blocks are its
            children. The budget is then for all memory of a stage: its parameters, gradients and optimizer state (see
            ``param_scale``), its activations, and gradients on their way between stages. ``"0.3x"`` is a part of what the largest
            stage takes without recomputation, ``"min"`` the smallest budget that does not double the time of the longest stage.
        chunks: micro-batches of a step; by default 2 for each stage.
        schedule, virtual_stages: as in :class:`hvd_ckpt.Pipeline`. With several parts of the model on a stage, each gets an equal
            share of the budget.
        param_scale: bytes of a trained parameter with its gradient and optimizer state, for each byte of the parameter alone: 4 for
            Adam, 3 for SGD with momentum, 2 for SGD, 2 + 2 / replicas for Adam with ``shard="optimizer"``.
        cache: a folder for plans. One made for the same model (its code, settings and shapes), shapes of the sample, loss, options,
            device, threads and versions is returned without a measurement (but not for ``"80%"``).

    Planning runs training steps of the model and puts everything back: parameters, buffers, gradients, random state. It can be
    called before or after an optimizer is wrapped. All ranks must call it: rank 0 plans, with the smallest budget of all.

    Returns:
        The plan, measured, not yet applied: ``plan.apply(model)``.

    Raises:
        ValueError: no blocks, a budget that cannot be read, a loss that is not a single number; ``offload`` without a GPU; stages
            of a model that is not a chain, or has too few blocks.
        BudgetError: no plan stays within the budget; names the smallest peak and what sets it, and has the plan that reaches it. Or
            the device has no room for the batch, whatever the budget. A budget in bytes that is below what runs around the blocks
            (embeddings, head, loss) is refused before they are measured.
    """
    from hvd_ckpt.planning.ranks import on_rank_0

    layout = None
    if stages is not None:
        if blocks is not None:
            raise ValueError("blocks: with stages the blocks are the children of the chain")
        layout = Layout.make(stages, chunks, schedule, virtual_stages)

    device = device_of(model, args)
    options = {
        "blocks": blocks,
        "autocast": autocast,
        "lossy": lossy,
        "chunk_head": chunk_head,
        "offload": offload,
    }
    of_stages = {"layout": layout, "param_scale": param_scale}

    def find(limit: Budget) -> Plan:
        with _talking(verbose) as say:
            given: dict[str, Any] = {"kwargs": kwargs, "loss": loss, "say": say, **options, **of_stages}
            make = functools.partial(make_plan, model, *args, budget=limit, **given)
            if cache is None or limit.kind == "device":  # which depends on what is free
                return make()
            key = key_of(model, (args, kwargs), loss, device, {"budget": limit, **options, **of_stages})
            return cached(cache, key, model, make, say)

    return on_rank_0(find, budget, device)


def make_plan(
    model: nn.Module,
    *args: Any,
    budget: Budget,
    layout: Layout | None = None,
    param_scale: float = PARAM_SCALE,
    **options: Any,
) -> Plan:
    """A plan that this process makes, whatever other ranks do.

    Args:
        layout: of pipeline stages, if any.
        options: of :class:`Planner`.

    Raises:
        ValueError, BudgetError: as :func:`plan`.
    """
    with _out_of_memory_exceeds_budgets(device_of(model, args)):
        if layout is None:
            return Planner(model, *args, budget=budget, **options).plan(budget)
        options = {**options, "blocks": layout.blocks_of(model), "chunk_head": False}
        return Planner(model, *args, **options).plan_stages(layout, budget, param_scale)


def largest_batch(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    budget: int | float | str,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    most: int = 65536,
    autocast: torch.dtype | None = None,
) -> tuple[int, Plan]:
    """The largest batch whose step fits ``budget``, and the plan that makes it fit.

    Args:
        make_sample: from a batch size to the model's arguments: a tensor or a tuple of them.
        budget: bytes, text with a unit, or a share of the device, as in :func:`plan`.
        most: the largest batch to try.

    Returns:
        batch size, plan

    Raises:
        ValueError: a budget that depends on the batch (``"0.3x"``, ``"min"``, None).
        BudgetError: not even a batch of one fits.
    """
    bound = parse_budget(budget)
    if not bound.is_absolute:
        raise ValueError(
            f"largest_batch needs a budget that does not depend on the batch, such as '6GiB' or '80%', got {budget!r}"
        )

    def attempt(batch: int) -> Plan:
        sample = make_sample(batch)
        return plan(
            model,
            *(sample if isinstance(sample, tuple) else (sample,)),
            loss=loss,
            budget=bound,
            autocast=autocast,
        )

    best, chosen = 1, attempt(1)
    limit = chosen.budget or 0
    too_large: int | None = None
    while best < most and (too_large is None or too_large - best > 1):
        if too_large is None:  # the smallest peak grows about linearly with the batch
            guess = min(int(0.98 * limit * best / chosen.smallest.peak_bytes), 4 * best, most)
        else:
            guess = (best + too_large) // 2
        guess = max(guess, best + 1)
        try:
            best, chosen = guess, attempt(guess)
        except BudgetError:
            too_large = guess
    return best, chosen


@contextlib.contextmanager
def _out_of_memory_exceeds_budgets(device: torch.device) -> Iterator[None]:
    """Turns an OutOfMemoryError of planning into a BudgetError."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        pass
    _free_what_failed()
    free = free_memory(device)
    raise BudgetError(
        f"No budget is enough for this batch: planning has run out of memory with {show_bytes(free)} free on {device}. Give a "
        "smaller batch.",
        free,
    )


def _free_what_failed() -> None:
    """Gives back the memory of a step that has failed."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _cost(solution: Solution) -> Cost:
    return Cost(solution.peak, solution.seconds)


def _talking(verbose: bool | None) -> contextlib.AbstractContextManager[Callable[[str], None]]:
    quiet = contextlib.nullcontext(lambda text: None)
    return quiet if verbose is False else talking("plan", after=0.0 if verbose else _SILENT_SECONDS)
