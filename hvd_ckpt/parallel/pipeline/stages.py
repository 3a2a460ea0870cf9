"""Plans for pipeline stages: cuts of a chain and policies of its blocks, chosen together for the memory of each stage.

The longest stage sets the time of a step. So the planner chooses the cuts that minimize the time of the longest part (forward pass,
recomputation and backward pass of one micro-batch), by an exact dynamic programme. The time of a part is that of the fastest way to
run it within its memory, which the solver finds. A part either keeps what the policies of its blocks keep, or it keeps only its
input and output, and is recomputed as a whole under these policies.

The memory of a part is the sum of

- its parameters and buffers, with gradients and optimizer state (``param_scale``);
- for each micro-batch in flight, its input and what is kept of it, and the working memory of the one that runs;
- the gradients that it sends to the previous part, which over Gloo stay until the end of the step, and one that arrives early.

The time of messages is not counted.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_ckpt.parallel.pipeline.balance import PARAM_SCALE, best_cuts
from hvd_ckpt.parallel.pipeline.schedule import (
    Schedule,
    Span,
    check_name,
    in_flight,
    make_schedule,
    timeline,
    virtual_stages_of,
)
from hvd_ckpt.planning.blocks import children_of
from hvd_ckpt.planning.budget import MIN_SLOWDOWN, Budget, BudgetError
from hvd_ckpt.planning.chain import Block
from hvd_ckpt.planning.plan import Cost, PipelinePlan, Plan, StagePlan
from hvd_ckpt.planning.solver import Solver
from hvd_ckpt.utils.text import show_bytes

_POINTS = 512  # points of a frontier


@dataclass(frozen=True)
class StageLayout:
    """Pipeline stages that a plan is made for: ``hc.plan(model, sample, layout=hc.StageLayout(4, chunks=8))``.

    Args:
        stages: number of pipeline stages.
        chunks: number of micro-batches of a step; by default, 2 for each stage.
        schedule, virtual_stages: as in :class:`hvd_ckpt.Pipeline`. If a stage has several parts of the model, each part gets an
            equal share of the budget.
        param_scale: bytes of a trained parameter with its gradient and optimizer state, for each byte of the parameter alone. This
            is 4 for Adam, 3 for SGD with momentum, 2 for SGD, and 2 + 2 / replicas for Adam with ``shard="optimizer"``.

    Raises:
        ValueError: a number or the schedule is invalid, or the schedule does not allow the number of virtual stages.
    """

    stages: int
    chunks: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    param_scale: float = PARAM_SCALE

    def __post_init__(self) -> None:
        for name, value in (("stages", self.stages), ("chunks", self.micro_batches)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number from 1, got {value!r}")
        if not isinstance(self.param_scale, (int, float)) or not 0 <= self.param_scale < math.inf:
            raise ValueError(f"param_scale must be a number of at least 0, got {self.param_scale!r}")
        check_name(self.schedule, self.parts_of_stage)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return 2 * self.stages if self.chunks is None else self.chunks

    @property
    def parts_of_stage(self) -> int:
        """Number of parts of the model on each stage."""
        return virtual_stages_of(self.schedule, self.virtual_stages)

    @property
    def parts(self) -> int:
        """Number of parts of the model."""
        return self.stages * self.parts_of_stage

    def blocks_of(self, model: nn.Module) -> list[str]:
        """Names of the blocks of a chain that is cut into these parts.

        Raises:
            ValueError: the model is not a chain, or has too few blocks.
        """
        names = children_of(model)
        if len(names) < self.parts:
            raise ValueError(
                f"{len(names)} blocks cannot be cut into {self.parts} parts for {self.stages} stages: give each at least one"
            )
        return names

    @functools.cached_property
    def actions(self) -> Schedule:
        """The schedule of each stage."""
        return make_schedule(self.schedule, self.stages, self.micro_batches, self.parts_of_stage)

    def plan(
        self,
        chain: Sequence[Block],
        blocks: Sequence[nn.Module],
        budget: Budget,
        device: torch.device,
        plan_of: Callable[..., Plan],
    ) -> Plan:
        """The plan that minimizes the time of the longest stage within a budget for each stage.

        Args:
            chain, blocks: as of :class:`StagePlanner`.
            plan_of: makes a plan from choices and facts.

        Raises:
            BudgetError: no plan fits the budget; the message has the smallest budget that works.
        """
        planner = StagePlanner(chain, blocks, self)
        limit = planner.limit(budget, device)

        def made(within: float) -> Plan:
            pipeline, choices = planner.pipeline(within)
            return plan_of(
                choices,
                budget=limit,
                predicted=_cost(pipeline),
                baseline=_cost(planner.baseline),
                smallest=_cost(planner.pipeline(planner.smallest)[0]),
                pipeline=pipeline,
            )

        if limit is not None and limit < planner.smallest:
            raise BudgetError(
                f"No plan for {self.stages} stages and {self.micro_batches} micro-batches stays within a budget of "
                f"{show_bytes(limit)} for each stage: the smallest budget that works is {planner.smallest} bytes "
                f"({show_bytes(planner.smallest)}), with weights, gradients and optimizer state. Give a larger budget, more stages "
                "or smaller micro-batches.",
                planner.smallest,
                made(planner.smallest),
            )
        return made(math.inf if limit is None else limit)


class _Held:
    """Bytes of parameters, gradients, optimizer state and buffers of consecutive blocks.

    Args:
        blocks: blocks of the chain.
        scale: bytes for each byte of a trained parameter.
    """

    def __init__(self, blocks: Sequence[nn.Module], scale: float) -> None:
        users: dict[Tensor, set[int]] = {}
        for number, block in enumerate(blocks):
            for tensor in (*block.parameters(), *block.buffers()):
                users.setdefault(tensor, set()).add(number)
        self.now = sum(tensor.nbytes + (0 if tensor.grad is None else tensor.grad.nbytes) for tensor in users)
        self._tied: list[tuple[int, int, set[int]]] = []
        alone = [0.0] * len(blocks)
        for tensor, numbers in users.items():
            held = int(tensor.nbytes * (scale if tensor.requires_grad else 1.0))
            if len(numbers) == 1:
                alone[min(numbers)] += held
            else:  # each stage has a copy, and copies exchange their gradients
                self._tied.append((held, tensor.nbytes if tensor.requires_grad else 0, numbers))
        self._before = [0, *itertools.accumulate(map(int, alone))]

    def __call__(self, first: int, end: int) -> int:
        total = self._before[end] - self._before[first]
        for held, exchanged, numbers in self._tied:
            inside = {number for number in numbers if first <= number < end}
            total += (held if inside else 0) + (exchanged if inside and inside != numbers else 0)
        return total


Solvers = dict[tuple[int, int], Solver]
"""By the number of micro-batches in flight, and the block at which a part ends."""


class StagePlanner:
    """Planner of cuts and policies for one measured chain.

    Args:
        chain: chain of a :class:`~hvd_ckpt.planning.profile.Profile` whose blocks are the children of the model, with the
            pseudo-blocks at its ends.
        blocks: the module of each block; at least as many as the layout has parts.
        layout: stages, micro-batches and schedule.
        solvers: those that planners of this chain for other layouts have made, to which this one adds its own.
    """

    def __init__(
        self,
        chain: Sequence[Block],
        blocks: Sequence[nn.Module],
        layout: StageLayout,
        solvers: Solvers | None = None,
    ) -> None:
        self.layout = layout
        self._blocks = [replace(block, joins_next=False) for block in chain[1:-1]]
        self._behind = chain[-1]
        self._shared = chain[0].choices[0].kept  # what all blocks share of a batch, such as masks
        self._inputs = [0, *(block.output for block in self._blocks[:-1])]
        self._held = _Held(blocks, layout.param_scale)
        self._in_flight = in_flight(layout.actions)
        self._solvers: Solvers = {} if solvers is None else solvers
        self._known: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    # ------------------------------------------------------------------------------------------------ one part

    def _ways(self, part: int, first: int, end: int) -> tuple[Any, Any]:
        """Bytes and seconds of all ways to run the blocks ``first`` to ``end - 1`` as that part."""
        # First the points of the frontier under policies alone. Then those of a part that is recomputed as a whole, if several
        # micro-batches are in flight:
        #
        #     memory     input and output for each micro-batch + max(first pass, recomputation under policies)
        #     seconds    first pass + recomputation under policies
        #
        # Parts differ only in their micro-batches in flight, so parts with equal numbers share the entry.
        key = (self._in_flight[part], first, end)
        if key not in self._known:
            count = key[0]
            fixed = self._fixed(count, first, end)
            kept = self._solver(count, end).from_block(first)
            memory, seconds = fixed + kept.need, kept.seconds
            if count > 1:
                inner = self._solver(0, end).from_block(first)
                blocks = self._blocks[first:end]
                boundaries = [0, *(block.output for block in blocks)]
                highest = max(
                    boundary + max(block.forward_working, block.output)
                    for boundary, block in zip(boundaries, blocks)
                )
                forward = sum(block.forward_seconds for block in blocks)
                if end == len(self._blocks):
                    behind = self._behind.choices[0]
                    highest, forward = max(highest, behind.backward_peak), forward + behind.seconds
                recomputed = fixed + count * boundaries[-1] + np.maximum(inner.need, highest)
                memory = np.concatenate((memory, recomputed))
                seconds = np.concatenate((seconds, forward + inner.seconds))
            self._known[key] = memory, seconds
        return self._known[key]

    def _solver(self, count: int, end: int) -> Solver:
        """The solver for the blocks before ``end`` with ``count`` micro-batches in flight; 0 for a recomputation of one
        micro-batch, during which the gradient of the output waits."""
        if (count, end) not in self._solvers:
            blocks = self._blocks[:end]
            if count == 0:
                waiting = blocks[-1].output
                blocks = [
                    block.with_costs(
                        lambda choice: {"forward_peak": waiting + max(choice.forward_peak, choice.kept)}
                    )
                    for block in blocks
                ]
            elif end == len(self._blocks):
                blocks = [*blocks, self._behind]
            self._solvers[count, end] = Solver(blocks, max(count, 1), _POINTS)
        return self._solvers[count, end]

    def _best(self, part: int, first: int, end: int, limit: float) -> tuple[StagePlan, list[int]]:
        """The fastest way to run a part within ``limit`` bytes, of which there must be one, and the choices of its blocks."""
        memory, seconds = self._ways(part, first, end)
        point = int(np.argmin(np.where(memory <= limit, seconds, math.inf)))
        solver = self._solver(self._in_flight[part], end)
        # The index among the ways to recompute the part as a whole.
        place = point - len(solver.from_block(first).need)
        recompute = place >= 0
        choices = self._solver(0, end).choices(first, place) if recompute else solver.choices(first, point)
        states, transport = self._held(first, end), self._transport(first, end)
        total, activations = float(seconds[point]), int(memory[point]) - states - transport
        # Both times are measured, each by itself. The backward pass, which is the rest, must not come out below 0.
        forward = min(sum(block.forward_seconds for block in self._blocks[first:end]), total)
        times = forward, total - forward
        made = StagePlan(
            end - first, recompute, self._in_flight[part], *times, states, activations, transport
        )
        return made, choices[: end - first]

    def _fixed(self, count: int, first: int, end: int) -> int:
        """Bytes of a part that do not depend on its policies, with ``count`` micro-batches in flight."""
        given = self._inputs[first] + self._shared
        return self._held(first, end) + self._transport(first, end) + count * given

    def _transport(self, first: int, end: int) -> int:
        # The gradient of the input of every micro-batch: Gloo holds what it sends until the end of the step.
        sent = self.layout.micro_batches * self._inputs[first]
        return sent + (self._blocks[end - 1].output if end < len(self._blocks) else 0)

    # ------------------------------------------------------------------------------------------------ all parts

    def _fastest(self, limit: float) -> tuple[list[int], float]:
        """The cuts that minimize the time of the longest part, and that time; inf if no cuts stay within the limit."""
        # Cuts are chosen part by part. So the parts of a stage share its memory equally, although one may need more.
        share = limit / self.layout.parts_of_stage

        def seconds(part: int, first: int, end: int) -> float:
            memory, seconds = self._ways(part, first, end)
            return float(np.min(seconds, initial=math.inf, where=memory <= share))

        return best_cuts(len(self._blocks), self.layout.parts, seconds)

    @functools.cached_property
    def smallest(self) -> int:
        """The smallest budget for which there is a plan."""
        count, parts = len(self._blocks), self.layout.parts
        _, most = best_cuts(count, parts, lambda *part: float(self._ways(*part)[0].min()))
        return int(most) * self.layout.parts_of_stage

    def pipeline(self, limit: float) -> tuple[PipelinePlan, list[int]]:
        """The fastest plan within a budget that is at least :attr:`smallest`, and the choice of each block."""
        layout, share = self.layout, limit / self.layout.parts_of_stage
        ends = [0, *itertools.accumulate(self._fastest(limit)[0])]
        spans = enumerate(itertools.pairwise(ends))
        parts, choices = zip(*(self._best(part, first, end, share) for part, (first, end) in spans))
        plan = PipelinePlan(layout.stages, layout.micro_batches, layout.schedule, parts)
        return plan, list(itertools.chain.from_iterable(choices))

    @functools.cached_property
    def baseline(self) -> PipelinePlan:
        """The plan without recomputation, with the best cuts for it."""
        kept = copy.copy(self)  # a planner of the same chain whose blocks have no other policy
        kept._blocks = [block.only(1) for block in self._blocks]
        kept._solvers, kept._known = {}, {}
        return kept.pipeline(math.inf)[0]

    def limit(self, budget: Budget, device: torch.device) -> int | None:
        """The budget in bytes; None for the fastest plan."""
        if budget.kind == "min":
            return self._min()
        limit = budget.bytes(max(self.baseline.memory), device)
        if budget.kind == "device" and limit is not None:  # the memory in use includes the model
            limit += self._held.now
        return limit

    def _min(self) -> int:
        longest = MIN_SLOWDOWN * self._fastest(math.inf)[1]
        # Time falls as the budget grows. ``high`` always satisfies the limit of time.
        low, high = self.smallest, max(self.smallest, *self.pipeline(math.inf)[0].memory)
        return low + bisect_left(
            range(low, high), True, key=lambda budget: self._fastest(budget)[1] <= longest
        )


def _cost(pipeline: PipelinePlan) -> Cost:
    """Bytes of the largest stage, and seconds of a step."""
    return Cost(max(pipeline.memory), max(rank[-1].end for rank in spans_of(pipeline)))


def spans_of(pipeline: PipelinePlan) -> list[list[Span]]:
    """For each stage the times of the passes of a step, if messages take no time."""
    actions = make_schedule(
        pipeline.schedule, pipeline.stages, pipeline.micro_batches, pipeline.virtual_stages
    )
    forward = [part.forward_seconds for part in pipeline.parts]
    return timeline(actions, forward, [part.backward_seconds for part in pipeline.parts])
