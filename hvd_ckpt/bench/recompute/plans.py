"""This library's side: a plan for each budget, and one for the measured peak of each contender.

Budgets in bytes are what a contender's step was measured to need, so a plan is compared with someone who has just as much memory.
Different budgets often have the same best plan; it is measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from hvd_ckpt.bench.recompute.chain import Forward
from hvd_ckpt.bench.recompute.contenders import OURS
from hvd_ckpt.bench.recompute.measure import Bench, Entry

if TYPE_CHECKING:
    from hvd_ckpt.planning.plan import Plan

__all__ = ["FASTEST", "make_plans"]

FASTEST = "fastest"
"""The budget that is none: the fastest plan at any memory."""


def make_plans(
    bench: Bench,
    budgets: Sequence[str],
    peers: Sequence[Entry],
    finish: Callable[[nn.Sequential], Forward] = lambda model: model,
    listener: Callable[[str], object] = lambda what: None,
) -> tuple[list[Entry], dict[str, str]]:
    """Plan for each budget and for each peer's peak, and measure each different plan.

    Args:
        bench: the workload.
        budgets: as :func:`hvd_ckpt.plan` takes them, or :data:`FASTEST`.
        peers: those that run.
        finish: makes a planned model a forward function, such as by compiling it.
        listener: hears of each plan before it is made.

    Returns:
        An entry for each different plan and each failure, and for each budget (its own name, or a peer's) the
        name of the entry that answers it.
    """
    from hvd_ckpt.planning.planner import Planner

    listener("profiling for plans")
    planner = Planner(bench.twin(), bench.inputs, loss=bench.loss)
    made: list[tuple[object, Entry]] = []
    answers: dict[str, str] = {}
    for name, label, budget in _wishes(budgets, peers):
        listener(label)
        entry = Entry(label, OURS, budget=budget)
        try:
            plan = planner.plan(None if budget == FASTEST else budget)
        except Exception as error:  # a budget that cannot be met, for one: it says what the smallest is
            entry.fail(error)
            made.append((label, entry))
        else:
            same = [other for one, other in made if one == _identity(plan)]
            if not same:
                entry.predicted_bytes = plan.predicted.peak_bytes
                entry.predicted_seconds = plan.predicted.seconds
                entry.measure(bench, lambda: finish(_applied(plan, bench.twin())))  # noqa: B023  # called at once
                made.append((_identity(plan), entry))
            entry = same[0] if same else entry
        answers[name] = entry.name
    return [entry for _, entry in made], answers


def _wishes(budgets: Iterable[str], peers: Iterable[Entry]) -> Iterable[tuple[str, str, int | str]]:
    """For each budget: what it is called, what its plan is called, and the budget itself."""
    for budget in budgets:
        yield budget, f"plan {budget}", budget
    for peer in peers:
        if peer.peak_bytes is not None:
            yield peer.name, f"plan for {peer.name}", peer.peak_bytes


def _applied(plan: Plan, model: nn.Sequential) -> nn.Sequential:
    plan.apply(model)
    return model


def _identity(plan: Plan) -> object:
    """What a plan does, without what it was made for."""
    return plan.items, [(block.name, block.policy) for block in plan.blocks]
