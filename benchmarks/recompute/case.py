"""One workload from start to end: the peaks of all methods, this library's plans for those peaks, and all steps timed.

Budgets in bytes are the measured peaks of methods, so a plan is compared with someone who needs as much memory. Different
budgets often have the same best plan; it is measured once.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from benchmarks.recompute.measure import BITWISE, Bench, Entry, twin
from benchmarks.recompute.methods import KEEP, OURS, methods
from hvd_ckpt.app.compare.runner.jobs import RankJob, reason
from hvd_ckpt.app.compare.runner.stats import Quartiles
from hvd_ckpt.app.compare.runner.workloads import RandomBatch, workload

if TYPE_CHECKING:
    from hvd_ckpt.planning.plan import Plan

FASTEST = "fastest"
"""The budget of the fastest plan, whatever memory it needs."""


@dataclass
class Case:
    """The results of one workload.

    Attributes:
        title: the workload, with its sizes.
        workload: its name.
        ranks: that trained together.
        batch: samples of a step over all ranks.
        entries: methods, in the order of the table; the first does not recompute.
        plans: of this library, each different one once.
        answers: for each budget and each method, the name of the plan for it.
        failure: why there are no results, or no plans.
        left_out: why it was not measured; no error.
    """

    title: str
    workload: str
    ranks: int = 1
    batch: int = 0
    entries: list[Entry] = field(default_factory=list)
    plans: list[Entry] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    left_out: str | None = None

    @classmethod
    def of(cls, job: RecomputeJob) -> Case:
        """The case of a job, before there are results."""
        title = job.workload.title + (f", autocast to {job.autocast}" if job.autocast else "")
        return cls(title, job.name, job.size, job.size * job.workload.batch)

    @property
    def keep(self) -> Entry:
        """No recomputation."""
        return self.entries[0]

    def answer(self, name: str) -> Entry | None:
        """This library's plan for the budget or the method of that name."""
        return next((plan for plan in self.plans if plan.name == self.answers.get(name)), None)

    def smallest(self) -> tuple[Entry, Entry, float] | None:
        """The plan with the smallest peak, the method with the smallest, and the ratio; None if either is missing."""
        ours = [plan for plan in self.plans if plan.runs and plan.right]
        theirs = [entry for entry in self.entries if entry.family != KEEP and entry.runs and entry.right]
        if not ours or not theirs:
            return None
        least, other = min(ours, key=_peak), min(theirs, key=_peak)
        return least, other, _peak(least) / _peak(other)

    def time_of_keep(self, entry: Entry) -> Quartiles | None:
        """The time of a step as a ratio to that of no recomputation."""
        return entry.ratio(self.keep)

    @property
    def sound(self) -> bool:
        """Whether no recomputation and all plans ran with the right result; a budget that cannot be met is no error."""
        if self.left_out is not None:
            return True
        plans = [plan for plan in self.plans if not (plan.failure or "").startswith("BudgetError")]
        entries = [self.keep, *plans] if self.entries else []
        return self.failure is None and all(entry.runs and entry.right for entry in entries)


@dataclass(frozen=True)
class RecomputeJob(RankJob):
    """One workload on several ranks.

    Attributes:
        name, sizes: of the workload.
        batch: samples of a step on each rank; None for the workload's own.
        families: which methods.
        budgets: of this library's plans.
        rounds: timed steps of each.
        autocast: dtype of the autocast that forward pass and loss run under, such as ``"bfloat16"``; None for none.
    """

    worker = "benchmarks.recompute.case:measure"

    name: str
    sizes: str
    batch: int | None
    families: tuple[str, ...]
    budgets: tuple[str, ...]
    rounds: int
    autocast: str | None = None

    @property
    def workload(self) -> RandomBatch:
        chosen = workload(self.name, self.sizes)
        return chosen if self.batch is None else dataclasses.replace(chosen, batch=self.batch)


def run_case(
    job: RecomputeJob, device: torch.device, listener: Callable[[str], object] = lambda what: None
) -> Case:
    """Measure a workload; on several ranks all call it alike. ``listener`` hears what is done next."""
    case, workload = Case.of(job), job.workload
    autocast = None if job.autocast is None else getattr(torch, job.autocast)
    bench = Bench(workload, device, job.size > 1, autocast)
    try:
        for method in methods(workload, len(bench.model), (KEEP, *job.families)):
            listener(method.name)
            entry = Entry(method.name, method.family)
            bench.measure(entry, functools.partial(method.build, twin(bench.model), bench.inputs))
            case.entries.append(entry)
            # The first method is no recomputation. By now all is imported: what is collected before each step is what steps leave.
            if method.family == KEEP:
                gc.freeze()
        if OURS in job.families:
            try:
                case.plans, case.answers = _make_plans(bench, job.budgets, case.entries, listener)
            except Exception as error:  # the methods' figures are worth having all the same
                case.failure = f"this library cannot plan: {reason(error)}"
        bench.time_rounds([*case.entries, *case.plans], job.rounds, listener)
    finally:
        gc.unfreeze()
    return case


def _make_plans(
    bench: Bench,
    budgets: Sequence[str],
    peers: Sequence[Entry],
    listener: Callable[[str], object],
) -> tuple[list[Entry], dict[str, str]]:
    """Plan for each budget and for each peer's peak, and measure each different plan.

    Returns:
        An entry for each different plan and each failure, and for each budget (its own name, or a peer's) the
        name of the entry that answers it.
    """
    from hvd_ckpt.planning.planner import Planner
    from hvd_ckpt.planning.ranks import on_rank_0

    @functools.cache
    def planner() -> Planner:  # made where it is needed: on rank 0
        listener("profiling for plans")
        return Planner(twin(bench.model), bench.inputs, loss=bench.loss, autocast=bench.autocast)

    made: list[tuple[object, Entry]] = []
    answers: dict[str, str] = {}
    for name, label, budget in _budgets(budgets, peers):
        listener(label)
        entry = Entry(label, OURS, budget=budget)
        try:
            plan = on_rank_0(
                lambda limit: planner().plan(limit), None if budget == FASTEST else budget, bench.device
            )
        except Exception as error:  # a budget that cannot be met, for one: it says what the smallest is
            entry.failure = reason(error)
            made.append((label, entry))
        else:
            same = [other for identity, other in made if identity == _identity(plan)]
            if not same:
                entry.predicted_bytes = plan.predicted.peak_bytes
                entry.predicted_seconds = plan.predicted.seconds
                bench.measure(entry, lambda: plan.apply(twin(bench.model)))  # noqa: B023  # called at once
                made.append((_identity(plan), entry))
            entry = same[0] if same else entry
        answers[name] = entry.name
    return [entry for _, entry in made], answers


def _budgets(budgets: Sequence[str], peers: Sequence[Entry]) -> Iterator[tuple[str, str, int | str]]:
    """For each budget: its name, the name of its plan, and the budget itself."""
    for budget in budgets:
        yield budget, f"plan {budget}", budget
    for peer in peers:
        if peer.runs and peer.peak_bytes is not None:
            yield peer.name, f"plan for {peer.name}", peer.peak_bytes


def _identity(plan: Plan) -> object:
    """The identity of a plan: its schedule, without budget and costs."""
    return plan.items, [dataclasses.replace(block, kept_bytes=0, added_seconds=0.0) for block in plan.blocks]


def merged(ranks: Sequence[Case]) -> Case:
    """The results of all ranks: the largest peaks, rank 0's seconds, and what differs on any rank."""
    case = ranks[0]
    # The ranks have the same entries in the same order: plans come from rank 0, and a failure is an entry, too.
    for entries in zip(*([*rank.entries, *rank.plans] for rank in ranks)):
        entry = entries[0]
        peaks = [other.peak_bytes for other in entries if other.peak_bytes is not None]
        entry.peak_bytes = max(peaks, default=None)
        entry.same = next((other.same for other in entries if other.same != BITWISE), BITWISE)
        entry.right = all(other.right for other in entries)
        entry.failure = next((other.failure for other in entries if other.failure), None)
    return case


def _peak(entry: Entry) -> int:
    assert entry.peak_bytes is not None
    return entry.peak_bytes


def measure(job: RecomputeJob) -> Case:
    """One rank of a job."""
    import hvd_ckpt as hc

    hc.init()
    return run_case(job, torch.device("cpu"))
