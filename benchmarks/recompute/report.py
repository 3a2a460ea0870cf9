"""The tables and the picture: each workload's methods, and this library's plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.recompute.case import Case
from benchmarks.recompute.measure import Entry
from benchmarks.recompute.methods import KEEP, OURS
from hvd_ckpt.app.compare.runner.cases import Column, Form, in_mib, table_of
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.runner.report import Report, Table, mebibytes, save_figure, shown
from hvd_ckpt.app.compare.runner.stats import Quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "recompute.png"
NOTES = (
    "peak: exact bytes that one step (forward pass, loss, backward pass; on several ranks also reduction and optimizer step) has "
    "allocated at most above its start, with the gradients of the parameters allocated before it, on the rank that needs most; "
    "ratio: to the step without recomputation.",
    "time ratio: the time of a step relative to that without recomputation, and for the plan to that of the method, between steps "
    "of the same round (rounds alternate: A B C, then C B A); median over rounds, quartiles in brackets. Below 1 is faster.",
    "result: bitwise where loss, gradients and buffers are those without recomputation, else what differs (gradients as a "
    "part of the largest value).",
    "plan: the one whose budget is the method's measured peak; made for: for how many budgets and methods a plan is the best.",
)
OUR_COLOR = "#1b6ca8"
STYLES = {
    KEEP: ("*", "#333333"),
    "sequential": ("o", "#d1495b"),
    "blocks": ("s", "#edae49"),
    "layers": ("h", "#2a9d8f"),
    "selective": ("^", "#66a182"),
    "torch_remat": ("v", "#7b5ea7"),
}
ACROSS = 2  # panels beside each other


def make_report(run: BenchRun, cases: Sequence[Case], device: torch.device, scale: str) -> Report:
    """The report of all cases so far; ``scale``: of the workloads."""
    shown = [case for case in cases if case.entries]
    tables = [table for case in shown for table in (method_table(case), plan_table(case))]
    facts = {
        "device": "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
    }
    results = [result(case) for case in cases]
    report = run.report("Recomputation, measured", tables, results, facts, notes=NOTES)
    report.settings["sizes"] = scale
    report.remarks = [line for case in cases for line in remarks(case)]
    report.draw = lambda folder: draw(folder, shown)
    return report


def method_table(case: Case) -> Table:
    """One row for each method; a family that does not run, for one reason, is one row."""
    rows = {entry.family if _fails(case, entry) else entry.name: entry for entry in case.entries}

    def name(entry: Entry) -> str:
        return entry.family if _fails(case, entry) else entry.name

    def plan_peak(entry: Entry) -> str:
        plan = case.answer(entry.name)
        return "none" if plan is not None and not plan.runs else mebibytes(plan.peak_bytes if plan else None)

    def plan_time(entry: Entry) -> Quartiles | None:
        plan = case.answer(entry.name)
        return plan.ratio(entry) if plan else None

    columns = [
        *_columns(case, "method", name, "does not run"),
        _of_running("plan: peak MiB", plan_peak),
        _of_running("plan: time ratio", plan_time, ".2f"),
    ]
    return table_of(columns, rows.values(), _title(case))


def plan_table(case: Case) -> Table:
    """One row for each different plan."""

    def of_seconds(plan: Entry) -> float | None:
        seconds = plan.step_seconds()
        return _ratio(seconds.median if seconds else None, plan.predicted_seconds)

    columns = [
        *_columns(case, "plan", lambda plan: plan.name, "none"),
        _of_running("of predicted peak", lambda plan: _ratio(plan.peak_bytes, plan.predicted_bytes), ".3f"),
        _of_running("of predicted time", of_seconds, ".2f"),
        Column("made for", lambda plan: list(case.answers.values()).count(plan.name)),
    ]
    return table_of(columns, case.plans)


def _columns(case: Case, title: str, name: Callable[[Entry], str], missing: str) -> list[Column]:
    """The first columns of both tables; ``missing``: the result of what does not run."""

    def time(entry: Entry) -> str:
        return "1" if entry.family == KEEP else shown(case.time_of_keep(entry), ".2f")

    return [
        Column(title, name, left=True),
        _of_running("peak MiB", lambda entry: entry.peak_bytes, in_mib()),
        _of_running("peak ratio", lambda entry: _ratio(entry.peak_bytes, case.keep.peak_bytes), ".2f"),
        _of_running("time ratio", time),
        Column("result", lambda entry: entry.same if entry.runs else missing, left=True),
    ]


def _of_running(title: str, of: Callable[[Entry], Any], form: Form = "") -> Column:
    return Column(title, lambda entry: of(entry) if entry.runs else None, form)


def _fails(case: Case, entry: Entry) -> bool:
    """Whether all of the method's family have failed, for the same reason."""
    family = [other for other in case.entries if other.family == entry.family]
    return len({other.failure for other in family}) == 1 and not any(other.runs for other in family)


def remarks(case: Case) -> list[str]:
    """The step that all are compared with, the smallest peaks, and which methods do not run and why."""
    lines = []
    if case.left_out or case.failure:
        lines.append(case.left_out or case.failure or "")
    if case.entries and (seconds := case.keep.step_seconds()):
        lines.append(f"{case.keep.name}: {seconds:.2f} s, {mebibytes(case.keep.peak_bytes)} MiB")
    if smallest := case.smallest():
        ours, other, ratio = smallest
        peaks = [f"{mebibytes(entry.peak_bytes)} MiB ({entry.name})" for entry in (ours, other)]
        lines.append(f"smallest peak: {peaks[0]}; of the other methods: {peaks[1]}; ratio {ratio:.2f}")
    failures: dict[str, list[str]] = {}
    for entry in (*case.entries, *case.plans):
        if entry.failure:
            name = entry.family if entry in case.entries and _fails(case, entry) else entry.name
            failures.setdefault(entry.failure, []).append(name)
    lines += [f"{'; '.join(dict.fromkeys(names))}: {why}" for why, names in failures.items()]
    return [f"{_name(case)}: {line}" for line in lines]


def result(case: Case) -> dict[str, Any]:
    """A case for programs: all seconds, and the ratios."""

    def values(entry: Entry) -> dict[str, Any]:
        plan = case.answer(entry.name)
        ratios = {"time_of_keep": case.time_of_keep(entry), "our_time_of_it": plan and plan.ratio(entry)}
        return {**vars(entry), **ratios}

    smallest = case.smallest()
    return {
        **vars(case),
        "entries": [values(entry) for entry in case.entries],
        "plans": [values(plan) for plan in case.plans],
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


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
