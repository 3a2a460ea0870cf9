"""The report of a comparison: which engine is right in which cell, what it costs, and every cell in detail.

The first two tables have a column for each engine; the numbers of segments share one entry as long as the verdict is the same.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.cli.tables import Table
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.runner.report import (
    Column,
    Report,
    in_mib,
    listed,
    save_figure,
    table_of,
)
from hvd_ckpt.app.compare.verdict import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REASON = 160  # characters
STYLES = {"right": "green", "loose": "yellow", "wrong": "red", "error": "red", "hang": "red"}
COLORS = dict(zip(STYLES, ("#4daf6e", "#f2d45c", "#f08a4b", "#c8505a", "#3b3b3b")))  # of the picture
MEANINGS = {"loose": "loose: right, but reduced more than once, or in another order each time"}
COST = "Step time as a ratio to stock Horovod without recomputation, and peak MiB; in parentheses where the result is wrong"
LEGEND = (
    "verdict: right; loose (right here, but a gradient is reduced more than once in a step, or two runs reduce in "
    "different orders); wrong; error; hang.",
    "ranks, bits: whether all ranks end in the same parameters, and all runs in the same parameters and buffers, bit for bit.",
    "weights, buffers: the largest difference from one process that computes each rank's batch in turn, with that rank's random "
    "state and buffers, and averages the gradients. Right means that none is off by more than 0.1 % of what training changed (5 % "
    "where weights are bfloat16, 2 % in mixed precision).",
    "reduced: most reductions of a gradient in a step; order: whether two runs reduce in the same order.",
    "step ms: median after two steps; ratio: to stock Horovod in the same pass, without recomputation where that is measured.",
    "peak MiB: the most that PyTorch's allocator had handed out at one time during training, weights included.",
)


def make_report(
    run: BenchRun,
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    *,
    subject: str,
    title: str,
    facts: Mapping[str, Any],
    remarks: Sequence[str],
) -> Report:
    """The report of a comparison.

    Args:
        workloads: for each workload its ``title``, ``line``, the reference's mean ``losses``, and whether it is ``small``.
        subject: the engine that must be right for the comparison to succeed.
        facts: lines in the place of options that were not given.
        remarks: a line for each engine that cannot run here: which, and why.
    """
    mine = [result for result in results if result.engine == subject]
    wrong = [f"{result.workload} {result.recomputed}" for result in mine if not result.right]
    success = bool(mine) and not wrong
    conclusion = f"{short_name(subject)} is right in all {len(mine)} cells."
    if not success:
        conclusion = f"{subject} is not right in {len(wrong)} of {len(mine)} cells: {', '.join(wrong)}."
    large = [result for result in results if not workloads[result.workload]["small"]]
    verdicts = _by_engine(
        f"Is the training result right? {title}", results, lambda result: result.variant, _verdict
    )
    costs = _by_engine(COST, large, lambda result: result.recomputed, _cost)
    trained: list[tuple[str, ...]] = [
        (name, found["title"], found["line"], f"{found['losses'][0]:.3f} to {found['losses'][-1]:.3f}")
        for name, found in workloads.items()
    ]
    columns = ("workload", "what is trained", "size", "loss")
    return run.report(
        "Engines compared",
        [verdicts, *([costs] if large else [])],
        [
            {**dataclasses.asdict(result), "right": result.right, "step_seconds": result.step_seconds}
            for result in results
        ],
        facts,
        remarks=[*remarks, *_reasons(mine)],
        notes=LEGEND,
        details=[
            *table_of(DETAILS, results, "Every cell").markdown(),
            "",
            *listed(_reasons(results)),
            *Table(columns, trained, "Workloads").markdown(),
        ],
        draw=lambda folder: [save_figure(draw_verdicts(verdicts), folder / "verdicts.png")],
        data={"right": success, "conclusion": conclusion, "subject": subject, "remarks": remarks},
        conclusion=conclusion,
        success=success,
    )


def _reasons(results: Iterable[Result]) -> Iterable[str]:
    """One line for each result that is not right: where, and why. Long reasons are cut."""
    for result in results:
        if not result.right:
            reason = textwrap.shorten(result.reason, REASON, placeholder=" ...")
            yield f"{result.engine}, {result.workload} {result.recomputed}: {result.status}, {reason}"


def _by_engine(
    title: str,
    results: Sequence[Result],
    row_of: Callable[[Result], str],
    entry: Callable[[Sequence[Result]], str],
) -> Table:
    """A row for each workload and way to recompute, a column for each engine; ``entry`` takes the results of both."""
    engines = dict.fromkeys(result.engine for result in results)
    rows: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        row = rows.setdefault((result.workload, row_of(result)), {})
        row.setdefault(result.engine, []).append(result)
    return Table(
        ("workload", "recomputed", *map(short_name, engines)),
        [
            (*names, *(entry(row[engine]) if engine in row else "-" for engine in engines))
            for names, row in rows.items()
        ],
        title=title,
        folded=1,
        style=lambda text: STYLES.get(text.split()[0], "") if text else "",
        mark=lambda text: f"**{text}**" if STYLES.get(text.split()[0], "green") != "green" else text,
    )


def short_name(engine: str) -> str:
    """An engine's name without the module it comes from."""
    return engine.rpartition(":")[2]


def _verdict(results: Sequence[Result]) -> str:
    """The worst verdict of some numbers of segments; with those it holds for, if it does not hold for all."""
    status = max((result.status for result in results), key=list(STYLES).index)
    where = [str(result.chunks) for result in results if result.status == status]
    return f"{status} x{','.join(where)}" if len(where) < len(results) else status


def _cost(results: Sequence[Result]) -> str:
    result = results[-1]
    if result.status in ("error", "hang"):
        return result.status
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    cost = f"{ratio}, {'-' if result.peak_bytes is None else in_mib()(result.peak_bytes)}"
    return f"({cost})" if result.status == "wrong" else cost


def _distance(difference: float | None, right: bool | None) -> str | None:
    if not difference:
        return None if difference is None else "exact"
    return f"{difference:.1e}" if right else f"OFF {difference:.0e}"


def _either(yes: str, no: str) -> Callable[[bool], str]:
    return lambda value: yes if value else no


DETAILS = (
    Column("workload", lambda result: result.workload),
    Column("recomputed", lambda result: result.recomputed),
    Column("engine", lambda result: short_name(result.engine)),
    Column("verdict", lambda result: result.status if result.right else result.status.upper()),
    Column("ranks", lambda result: result.ranks_equal, _either("equal", "DIFFER")),
    Column("weights", lambda result: _distance(result.difference, result.weights_right)),
    Column("buffers", lambda result: _distance(result.buffer_difference, result.buffers_right)),
    Column("runs", lambda result: result.runs or None),
    Column("bits", lambda result: result.repeatable, _either("equal", "DIFFER")),
    Column("reduced", lambda result: result.most),
    Column("order", lambda result: result.same_order, _either("same", "VARIES")),
    Column("step ms", lambda result: result.step_seconds and 1000 * result.step_seconds, ".1f"),
    Column("ratio", lambda result: result.ratio, ".2f"),
    Column("peak MiB", lambda result: result.peak_bytes, in_mib(".2f")),
)


def draw_verdicts(table: Table) -> Figure:
    """Draws the entries of a table in the colours of their verdicts; ``x2`` stands for one of two segments."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    engines = table.columns[2:]
    figure = Figure(figsize=(3.5 + 1.35 * len(engines), 1.3 + 0.27 * len(table.rows)))
    axes = figure.add_subplot()
    for y, (_, _, *entries) in enumerate(table.rows):
        for x, entry in enumerate(entries):
            status, _, segments = entry.partition(" x")
            if status in COLORS:
                text = f"{status}: {segments.replace(',', ', ')} segments" if segments else status
                color = "white" if status in ("hang", "error") else "black"
                axes.add_patch(Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, color=COLORS[status]))
                axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=7, color=color)
    axes.set(xlim=(0, len(engines)), ylim=(len(table.rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(engines))], engines)
    axes.xaxis.tick_top()
    rows = [f"{workload}, {variant}" for workload, variant, *_ in table.rows]
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    patches = [Patch(color=color, label=MEANINGS.get(status, status)) for status, color in COLORS.items()]
    axes.legend(
        handles=patches,
        ncols=len(patches),
        frameon=False,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.005),
    )
    axes.set_title(table.title, fontsize=10, pad=28)
    return figure
