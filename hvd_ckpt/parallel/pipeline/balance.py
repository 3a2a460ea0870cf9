"""Cuts of a chain into consecutive parts that minimize the cost of the most expensive part, or that a plan gives."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.planning.blocks import FoundBlock, check_called, children_of, find_blocks
from hvd_ckpt.planning.kinds import BlockRunner
from hvd_ckpt.planning.plan import PipelinePlan, Plan, PlanError
from hvd_ckpt.planning.policy import KEEP
from hvd_ckpt.planning.ranks import on_rank_0
from hvd_ckpt.planning.step import Sample, Step
from hvd_ckpt.utils.measure import undisturbed

KINDS = ("time", "size")  # of measured costs
PARAM_SCALE = 4.0  # bytes of a parameter with its gradient and Adam's state, for each byte of the parameter


def block_costs(kind: str, model: nn.Sequential, sample: Any, seconds: float = 1.0) -> list[float]:
    """The cost of each block of a chain, measured by the first rank for all, as torchgpipe does (Kim et al., 2020). Collective.

    Args:
        kind: ``"time"``: seconds of the forward and backward pass. ``"size"``: bytes that a micro-batch keeps for the backward
            pass, and those of parameters with gradients and optimizer state (:data:`PARAM_SCALE`).
        model: the chain, in training mode.
        sample: a micro-batch: the argument of the model, a tuple of several positional arguments, or a
            :class:`hvd_ckpt.data.Batch`.
        seconds: of measurement for each kind of block; at least three rounds are measured.

    Raises:
        ValueError: the kind is unknown, or the model does not call each block once.
    """
    if kind not in KINDS:
        raise ValueError(f"balance must be numbers of blocks, {' or '.join(map(repr, KINDS))}, not {kind!r}")
    args, shared = sample if isinstance(sample, tuple) else (sample,), {}
    if hasattr(sample, "inputs"):
        args, shared = sample.inputs, sample.shared
    step = Step(model, Sample(args, shared, None))

    def cost(block: FoundBlock) -> float:
        runner = BlockRunner(step, block, block.args or (), block.kwargs or {})
        if kind == "time":
            return runner.seconds([KEEP], seconds)[0]
        runner.memory([KEEP])  # allocates the gradients, which must not count
        parameters = sum(parameter.nbytes for parameter in block.modules[0].parameters())
        return runner.memory([KEEP])[0].kept + PARAM_SCALE * parameters

    def measured(_: Any) -> list[float]:
        with undisturbed(model, step.device):
            blocks = find_blocks(model, step.forward, children_of(model))
            check_called(model, blocks)
            costs: dict[int, float] = {}
            for block in blocks:
                if block.like not in costs:
                    costs[block.like] = cost(block)
            return [costs[block.like] for block in blocks]

    # A budget means nothing here. None is one that all ranks share.
    return on_rank_0(measured, None, step.device)


def block_bytes(blocks: Sequence[nn.Module]) -> list[float]:
    """The bytes of parameters and buffers of each block. A tensor that several blocks share counts in the first of them."""
    seen: set[Tensor] = set()
    costs = []
    for block in blocks:
        tensors = {*block.parameters(), *block.buffers()} - seen
        seen |= tensors
        costs.append(float(sum(tensor.nbytes for tensor in tensors)))
    return costs


def balance_costs(costs: Sequence[float], parts: int) -> list[int]:
    """The number of consecutive blocks in each part, at least one, that minimizes the cost of the most expensive part. The cost of
    a part is the sum over its blocks.

    Raises:
        ValueError: there are fewer blocks than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(
            f"a chain of {count} blocks cannot be cut into {parts} parts: give each at least one"
        )
    before = list(itertools.accumulate(costs, initial=0.0))
    return best_cuts(count, parts, lambda part, start, end: before[end] - before[start])[0]


def best_cuts(count: int, parts: int, cost: Callable[[int, int, int], float]) -> tuple[list[int], float]:
    """The number of consecutive blocks in each part that minimizes the cost of the most expensive part, and that cost.

    An exact dynamic programme in O(n^2 p) steps for n blocks and p parts. Among equally good cuts, it chooses the one whose earlier
    parts have the fewest blocks.

    Args:
        count: number of blocks, at least ``parts``.
        cost: takes the number of a part, its first block and the block after its last. It returns a number, or inf if that part is
            impossible.
    """

    # least(part, start) = min over end of max(cost(part, start, end), least(part + 1, end))
    #
    # An example: costs 3 1 1 3 and two parts. The last part alone, from block 1, 2 or 3 on, costs 5, 4 or 3. So with the
    # first one, end 1 costs max(3, 5), end 2 costs max(4, 4), end 3 costs max(5, 3), and the cut is before block 2.
    @functools.cache
    def least(part: int, start: int) -> tuple[float, int]:
        """The cost of the most expensive part from this one on, and the end of this one."""
        if part == parts - 1:
            return cost(part, start, count), count
        longest, best_end = math.inf, start + 1
        for end in range(start + 1, count - parts + part + 2):
            rest, _ = least(part + 1, end)
            # The rest alone is no better than the best so far. Skipped before cost() is called, which may run a solver.
            if rest >= longest:
                continue
            found = max(cost(part, start, end), rest)
            if found < longest:
                longest, best_end = found, end
        return longest, best_end

    balance, start = [], 0
    for part in range(parts):
        _, end = least(part, start)
        balance.append(end - start)
        start = end
    return balance, least(0, 0)[0]


def cuts_of(plan: Plan, stages: int) -> PipelinePlan:
    """The cuts of a plan for so many stages.

    Raises:
        TypeError: it is not a plan.
        PlanError: the plan has no stages or another number of stages.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a plan of hc.plan(), got {plan!r}")
    if plan.pipeline is None:
        raise PlanError(
            "The plan was made without stages: make one with hc.plan(..., layout=hc.StageLayout(hc.grid().stages))."
        )
    if plan.pipeline.stages != stages:
        raise PlanError(
            f"The plan was made for {plan.pipeline.stages} stages, and this job has {stages}: make one with "
            f"hc.plan(..., layout=hc.StageLayout({stages}))."
        )
    return plan.pipeline


def check_balance(balance: Sequence[int], blocks: int, parts: int) -> list[int]:
    """Raises ValueError unless ``balance`` has ``parts`` numbers of blocks from 1 whose sum is ``blocks``."""
    numbers = list(balance) if isinstance(balance, Sequence) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in numbers)
    if not whole or len(numbers) != parts or sum(numbers) != blocks:
        raise ValueError(
            f"balance must be {parts} numbers of blocks from 1, which are {blocks} together, got {balance!r}"
        )
    return numbers
