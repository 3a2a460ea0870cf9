"""One workload from start to end: peaks of all contenders, plans of ours for those peaks, and then everyone against the clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hvd_ckpt.bench.harness.stats import Quartiles
from hvd_ckpt.bench.recompute.compiled import COMPILED, compile_chain, compiled_contenders
from hvd_ckpt.bench.recompute.contenders import KEEP, OURS, Contender, contenders
from hvd_ckpt.bench.recompute.measure import Bench, Entry, reason, time_rounds
from hvd_ckpt.bench.recompute.plans import make_plans
from hvd_ckpt.bench.recompute.workloads import Workload

__all__ = ["WANTED_SMALLEST", "Case", "run_case"]

WANTED_SMALLEST = 0.8  # our smallest peak, as a ratio to the smallest of any contender's


@dataclass
class Case:
    """What was found out about one workload.

    Attributes:
        workload: name; ``title`` says its sizes.
        compiled: whether everything ran under ``torch.compile``.
        wanted: the most that a step of our plan may take, as a ratio to the contender's whose peak it was made for.
        wanted_keep: the same for keeping everything; None where nothing is asked.
        entries: contenders, in the order of the table; the first keeps everything.
        plans: ours, each different one once.
        answers: for each budget and each contender, the name of our plan for it.
        failure: why there are no plans, if there are none for a reason of their own.
    """

    workload: str
    title: str
    compiled: bool
    wanted: float
    wanted_keep: float | None
    entries: list[Entry] = field(default_factory=list)
    plans: list[Entry] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    failure: str | None = None

    @property
    def keep(self) -> Entry:
        """Who keeps everything."""
        return self.entries[0]

    def answer(self, name: str) -> Entry | None:
        """Our plan for the budget or the contender of that name."""
        return next((plan for plan in self.plans if plan.name == self.answers.get(name)), None)

    def limit(self, entry: Entry) -> float | None:
        """The most that our plan's step may take, as a ratio to this contender's."""
        return self.wanted_keep if entry.family == KEEP else self.wanted

    def verdict(self, entry: Entry) -> bool | None:
        """Whether our plan needs no more memory than this contender and little enough time; None if that cannot be said."""
        plan, limit = self.answer(entry.name), self.limit(entry)
        if plan is None or limit is None or not (entry.runs and entry.right):
            return None
        if plan.peak_bytes is None or entry.peak_bytes is None:
            return False
        ratio = plan.ratio(entry)
        return None if ratio is None else plan.peak_bytes <= entry.peak_bytes and ratio.median <= limit

    def smallest(self) -> tuple[Entry, Entry, float] | None:
        """Our plan with the smallest peak, the contender with the smallest, and the ratio; None if either is missing."""
        ours = [plan for plan in self.plans if plan.runs and plan.right]
        theirs = [entry for entry in self.entries if entry.family != KEEP and entry.runs and entry.right]
        if not ours or not theirs:
            return None
        least, other = min(ours, key=_peak), min(theirs, key=_peak)
        return least, other, _peak(least) / _peak(other)

    def time_of_keep(self, entry: Entry) -> Quartiles | None:
        """The time of a step as a ratio to that of keeping everything."""
        return entry.ratio(self.keep)

    @property
    def sound(self) -> bool:
        """Whether keeping everything and all our plans ran, with the result wanted; a budget that cannot be met is an answer."""
        plans = [plan for plan in self.plans if not (plan.failure or "").startswith("BudgetError")]
        return self.failure is None and all(entry.runs and entry.right for entry in (self.keep, *plans))


def run_case(
    workload: Workload,
    device: torch.device,
    families: Sequence[str],
    budgets: Sequence[str],
    rounds: int,
    compiled: bool = False,
    listener: Callable[[str], object] = lambda what: None,
) -> Case:
    """Measure a workload.

    Args:
        workload: what is trained.
        device: where.
        families: which contenders; keeping everything is always one.
        budgets: of our plans, beside the contenders' peaks.
        rounds: timed steps of each.
        compiled: whether all of it runs under ``torch.compile``.
        listener: hears what is done next.
    """
    on_gpu = device.type == "cuda"
    case = Case(
        workload.name,
        workload.title,
        compiled,
        wanted=0.95 if on_gpu else workload.wanted,
        wanted_keep=1.02 if on_gpu else None,
    )
    try:
        _measure(case, Bench(workload, device), families, budgets, rounds, listener)
    finally:
        gc.unfreeze()
    for entry in (*case.entries, *case.plans):
        entry.forward = None  # lets the models go
    return case


def _measure(
    case: Case,
    bench: Bench,
    families: Sequence[str],
    budgets: Sequence[str],
    rounds: int,
    listener: Callable[[str], object],
) -> None:
    for contender in _contenders(bench, families, case.compiled):
        listener(contender.name)
        case.entries.append(_measured(bench, contender, case))
        if contender.family == KEEP:
            gc.freeze()  # by now all is imported: what is collected before each step is what the steps leave
            if case.compiled and case.keep.forward:
                # A compiled step draws its random numbers in another way than an eager one.
                bench.refer_to(case.keep.forward)
                case.keep.peak_bytes, case.keep.same, case.keep.right = bench.examine(case.keep.forward)
    if OURS in families:
        peers = [entry for entry in case.entries if entry.runs]
        try:
            if case.compiled:
                case.plans, case.answers = make_plans(bench, budgets, peers, compile_chain, listener)
            else:
                case.plans, case.answers = make_plans(bench, budgets, peers, listener=listener)
        except Exception as error:  # the contenders' figures are worth having all the same
            case.failure = f"this library cannot plan: {reason(error)}"
    time_rounds(bench, [*case.entries, *case.plans], rounds, listener)


def _contenders(bench: Bench, families: Sequence[str], compiled: bool) -> list[Contender]:
    if compiled:
        return [one for one in compiled_contenders() if one.family == KEEP or COMPILED in families]
    return contenders(bench.workload, len(bench.model), (KEEP, *families))


def _measured(bench: Bench, contender: Contender, case: Case) -> Entry:
    needed = case.keep.peak_bytes or 0 if case.entries else 0
    entry = Entry(contender.name, contender.family)
    entry.measure(bench, lambda: contender.build(bench.twin(), bench.inputs, needed))
    return entry


def _peak(entry: Entry) -> int:
    assert entry.peak_bytes is not None
    return entry.peak_bytes
