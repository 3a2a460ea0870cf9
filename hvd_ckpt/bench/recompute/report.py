"""The tables and the picture: each workload's methods, and this library's plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ckpt.bench.harness.report import Report, Table, mebibytes, save_figure, shown
from hvd_ckpt.bench.recompute.case import Case
from hvd_ckpt.bench.recompute.measure import Entry
from hvd_ckpt.bench.recompute.methods import KEEP, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "recompute.png"
COLUMNS = ("method", "peak MiB", "peak ratio", "time ratio", "result", "plan: peak MiB", "plan: time ratio")
PLAN_COLUMNS = (
    "plan", "peak MiB", "peak ratio", "time ratio", "result", "of predicted peak", "of predicted time", "made for"
)  # fmt: skip
NOTES = (
    "peak: exact bytes that one step (forward pass, loss, backward pass; on several ranks also reduction and optimizer step) has "
    "allocated at most above its start, with the gradients of the parameters allocated before it, on the rank that needs most; "
    "ratio: to the step without recomputation.",
    "time ratio: the time of a step relative to that without recomputation, and for the plan to that of the method, between steps "
    "of the same round (rounds alternate: A B C, then C B A); median over rounds, quartiles in brackets. Below 1 is faster.",
    "result: bitwise where loss, gradients and buffers are those without recomputation, else what differs (gradients as a "
    "part of the largest value).",
    "plan: the one whose budget is the method's measured peak; made for: for how many budgets and methods a plan is the best.",
    "ckptplan measures no bytes on a CPU and refuses to plan there; it was given the bytes that this library measures.",
)
OUR_COLOR = "#1b6ca8"
STYLES = {
    KEEP: ("*", "#333333"),
    "sequential": ("o", "#d1495b"),
    "blocks": ("s", "#edae49"),
    "layers": ("h", "#2a9d8f"),
    "selective": ("^", "#66a182"),
    "torch_remat": ("v", "#7b5ea7"),
    "ckptplan": ("P", "#8d6a4f"),
    "rockmate": ("X", "#5c677d"),
}
ACROSS = 2  # panels beside each other


def make_report(cases: Sequence[Case], facts: dict[str, str], settings: dict[str, Any]) -> Report:
    """The report of all cases so far."""
    shown = [case for case in cases if case.entries]
    return Report(
        "Recomputation, measured",
        facts,
        [table for case in shown for table in (method_table(case), plan_table(case))],
        [result(case) for case in cases],
        [line for case in cases for line in remarks(case)],
        NOTES,
        draw=lambda folder: draw(folder, shown),
        settings=settings,
    )


def method_table(case: Case) -> Table:
    """One row for each method; a family that does not run, for one reason, is one row."""
    rows: dict[str, tuple[str, ...]] = {}
    for entry in case.entries:
        if not entry.runs:
            name = entry.family if _fails(case, entry) else entry.name
            rows[name] = (name, *"---", "does not run", *"--")
            continue
        plan = case.answer(entry.name)
        ours = "none" if plan is not None and not plan.runs else _mib(plan)
        rows[entry.name] = (*_figures(case, entry), ours, shown(plan.ratio(entry) if plan else None, ".2f"))
    return Table(COLUMNS, list(rows.values()), _title(case), left=("method", "result"))


def plan_table(case: Case) -> Table:
    """One row for each different plan."""
    rows: list[tuple[str, ...]] = []
    for plan in case.plans:
        budgets = str(list(case.answers.values()).count(plan.name))
        if not plan.runs:
            rows.append((plan.name, *"---", "none", *"--", budgets))
            continue
        seconds = plan.step_seconds()
        of_bytes = _ratio(plan.peak_bytes, plan.predicted_bytes, 3)
        of_seconds = _ratio(seconds.median if seconds else None, plan.predicted_seconds)
        rows.append((*_figures(case, plan), of_bytes, of_seconds, budgets))
    return Table(PLAN_COLUMNS, rows, left=("plan", "result"))


def _fails(case: Case, entry: Entry) -> bool:
    """Whether all of the method's family have failed, for the same reason."""
    family = [one for one in case.entries if one.family == entry.family]
    return len({one.failure for one in family}) == 1 and not any(one.runs for one in family)


def _figures(case: Case, entry: Entry) -> tuple[str, ...]:
    """The first columns of every row."""
    time = "1" if entry.family == KEEP else shown(case.time_of_keep(entry), ".2f")
    return entry.name, _mib(entry), _ratio(entry.peak_bytes, case.keep.peak_bytes), time, entry.same


def remarks(case: Case) -> list[str]:
    """The step that all are compared with, the smallest peaks, and which methods do not run and why."""
    lines = []
    if case.left_out or case.failure:
        lines.append(case.left_out or case.failure or "")
    if case.entries and (seconds := case.keep.step_seconds()):
        lines.append(f"{case.keep.name}: {seconds:.2f} s, {_mib(case.keep)} MiB")
    if smallest := case.smallest():
        ours, other, ratio = smallest
        lines.append(
            f"smallest peak: {_mib(ours)} MiB ({ours.name}); of the other methods: {_mib(other)} MiB "
            f"({other.name}); ratio {ratio:.2f}"
        )
    failures: dict[str, list[str]] = {}
    for entry in (*case.entries, *case.plans):
        if entry.failure:
            name = entry.family if entry in case.entries and _fails(case, entry) else entry.name
            failures.setdefault(entry.failure, []).append(name)
    lines += [f"{'; '.join(dict.fromkeys(names))}: {why}" for why, names in failures.items()]
    return [f"{_name(case)}: {line}" for line in lines]


def result(case: Case) -> dict[str, Any]:
    """A case for programs: all seconds, and the ratios."""

    def entry(one: Entry) -> dict[str, Any]:
        answer = case.answer(one.name)
        return {
            **vars(one),
            "time_of_keep": case.time_of_keep(one),
            "our_time_of_it": answer and answer.ratio(one),
        }

    smallest = case.smallest()
    return {
        **vars(case),
        "entries": [entry(one) for one in case.entries],
        "plans": [entry(one) for one in case.plans],
        "smallest_peak_ratio": smallest and smallest[2],
    }


def draw(folder: Path, cases: Sequence[Case]) -> list[str]:
    """A panel for each case: peak as a ratio to no recomputation across, time as a ratio to it upwards."""
    from matplotlib.figure import Figure

    if not cases:
        return []
    rows, columns = -(-len(cases) // ACROSS), min(ACROSS, len(cases))
    figure = Figure(figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    for number, case in enumerate(cases, start=1):
        _plot(figure.add_subplot(rows, columns, number), case)
    return [save_figure(figure, folder / PICTURE)]


def _plot(axes: Axes, case: Case) -> None:
    for family in dict.fromkeys(entry.family for entry in case.entries):
        points = _points(case, [entry for entry in case.entries if entry.family == family])
        marker, color = STYLES.get(family, ("o", "#999999"))
        if points:
            size = 8 if family == KEEP else 6
            label = "no recomputation" if family == KEEP else family
            axes.plot(*zip(*points), marker, color=color, label=label, markersize=size)
    plans = sorted(_points(case, case.plans))
    if plans:
        axes.plot(
            *zip(*plans), "-o", color=OUR_COLOR, label=f"{OURS} (hvd_ckpt)", linewidth=1.2, markersize=4
        )
    axes.set_title(_name(case), fontsize=10)
    axes.set_xlabel("peak memory of a step / no recomputation")
    axes.set_ylabel("time of a step / no recomputation")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _points(case: Case, entries: Sequence[Entry]) -> list[tuple[float, float]]:
    points = []
    for entry in entries:
        time = case.time_of_keep(entry)
        if entry.right and time is not None and entry.peak_bytes is not None and case.keep.peak_bytes:
            points.append((entry.peak_bytes / case.keep.peak_bytes, time.median))
    return points


def _name(case: Case) -> str:
    ranks = f", {case.ranks} ranks" if case.ranks > 1 else ""
    return f"{case.workload}{ranks}, batch {case.batch}"


def _title(case: Case) -> str:
    return f"{_name(case)}. {case.title}"


def _mib(entry: Entry | None) -> str:
    return mebibytes(None if entry is None else entry.peak_bytes)


def _ratio(one: float | None, other: float | None, digits: int = 2) -> str:
    return f"{one / other:.{digits}f}" if one is not None and other else "-"
