"""The report of a comparison: which engine is right in which cell, what it costs, and every cell in detail.

The first two tables have a column for each engine; the numbers of segments share one entry as long as the verdict is the same.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_ckpt.app.compare.runner.report import Column, Report, Table, in_mib, mebibytes, shown, table_of
from hvd_ckpt.app.compare.verdict import (
    BASELINE,
    Result,
    by_variant,
    engines_of,
    recomputed,
    short_name,
    worst,
)

REASON = 160  # characters
STYLES = {"right": "green", "loose": "yellow", "wrong": "red", "error": "red", "hang": "red"}
PRICE = (
    "Step time as a ratio to stock Horovod without recomputation, and peak memory in MiB. A wrong result has its price in "
    "parentheses."
)
LEGEND = (
    "verdict: right; loose (right here, but a gradient is reduced more than once in a step, or two runs reduce in "
    "different orders); wrong; error; hang.",
    "ranks: whether all ranks end with the same parameters, bit for bit.",
    "weights, buffers: the largest difference of a parameter, of a buffer such as a batch norm's statistics, from one "
    "process that computes each rank's batch in turn, with that rank's random state and buffers, and averages the "
    "gradients. Right means that none is off by more than 0.1 % of what training changed (5 % where weights are bfloat16, "
    "2 % in mixed precision).",
    "runs: whether repeated runs end in the same parameters and buffers, bit for bit, and how many there were.",
    "reduced: how many reductions a parameter's gradient takes part in per step, fewest and most.",
    "order: whether two runs reduce in the same order (for Horovod, as its timeline has it).",
    "step ms: median time of a step after the first two; ratio: to the step time of stock Horovod in "
    f"the same pass (jobs alternate: A B C, then C B A): of its cell without recomputation, else of the same cell ({BASELINE}).",
    "peak MiB: the most that PyTorch's allocator had handed out at one time during training, weights, gradients and "
    "optimizer included; communication threads' own buffers are not part of it.",
    "stages-, parts-: ranks have one model together; what each has is compared with the same in one process, which runs the same "
    "micro-batches. Dropout is right where the masks are those of the whole model; other masks are not wrong for training, but the "
    "result then depends on the number of ranks.",
)


def conclude(results: Sequence[Result], subject: str) -> tuple[bool, str]:
    """Whether the subject is right in every cell, and a sentence that says where it is not."""
    mine = [result for result in results if result.engine == subject]
    wrong = [result for result in mine if not result.right]
    if not mine:
        return False, f"{subject} has no cells to be right in."
    if not wrong:
        return True, f"{short_name(subject)} is right in all {len(mine)} cells."
    names = ", ".join(f"{result.workload} {recomputed(result)}" for result in wrong)
    return False, f"{subject} is not right in {len(wrong)} of {len(mine)} cells: {names}."


def make_report(
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    subject: str,
    settings: dict[str, Any],
    facts: dict[str, str],
    remarks: Sequence[str],
) -> Report:
    """The report of a comparison.

    Args:
        results: one per engine and cell.
        workloads: for each workload its ``title``, ``line``, the reference's mean ``losses``, and whether it is ``small``.
        subject: the engine that must be right for the comparison to succeed.
        settings: of the comparison, as plain values.
        facts: of the machine, and the settings.
        remarks: a line for each engine that cannot run here, and for each cell that an engine did not train: which, and why.
    """
    success, conclusion = conclude(results, subject)
    large = [result for result in results if not workloads[result.workload]["small"]]
    title = f"{settings['np']} ranks over {settings['controller']}, {settings['precision']}"
    trained: list[tuple[str, ...]] = [
        (name, found["title"], found["line"], f"{found['losses'][0]:.3f} to {found['losses'][-1]:.3f}")
        for name, found in workloads.items()
    ]

    def draw(folder: Any) -> list[str]:
        from hvd_ckpt.app.compare.pictures import draw_all

        return draw_all(folder, results, title)

    return Report(
        "Engines compared",
        facts,
        [
            _by_engine(f"Verdicts: {title}", by_variant(results), _verdict),
            *(
                [_by_engine("Step time and peak memory", by_variant(large, recomputed), _cost, PRICE)]
                * bool(large)
            ),
            Table(("workload", "what is trained", "size", "loss"), trained, title="Workloads", printed=False),
        ],
        [
            {**dataclasses.asdict(result), "right": result.right, "step_seconds": result.step_seconds}
            for result in results
        ],
        remarks=[*remarks, *_reasons(result for result in results if result.engine == subject)],
        notes=LEGEND,
        details=[table_of(DETAILS, results, "Every cell")],
        detail_remarks=list(_reasons(results)),
        draw=draw,
        settings=settings,
        data={
            "right": success,
            "conclusion": conclusion,
            "subject": subject,
            "workloads": workloads,
            "remarks": remarks,
        },
        conclusion=conclusion,
        success=success,
    )


def _reasons(results: Iterable[Result]) -> Iterable[str]:
    """One line for each result that is not right: where, and why. Long reasons are cut."""
    for result in results:
        if not result.right:
            reason = textwrap.shorten(result.reason, REASON, placeholder=" ...")
            yield f"{result.engine}, {result.workload} {recomputed(result)}: {result.status}, {reason}"


def _by_engine(
    title: str,
    rows: Mapping[tuple[str, str], Mapping[str, Sequence[Result]]],
    entry: Callable[[Sequence[Result]], str],
    note: str = "",
) -> Table:
    """A row for each workload and way to recompute, and a column for each engine."""
    engines = engines_of(result for row in rows.values() for results in row.values() for result in results)
    columns = ("workload", "recomputed", *map(short_name, engines))
    return Table(
        columns,
        [
            (*names, *(entry(row[engine]) if engine in row else "-" for engine in engines))
            for names, row in rows.items()
        ],
        title=title,
        left=columns,
        folded=1,
        style=lambda text: STYLES.get(text.split()[0], "") if text else "",
        mark=lambda text: f"**{text}**" if STYLES.get(text.split()[0], "green") != "green" else text,
        note=note,
    )


def _verdict(results: Sequence[Result]) -> str:
    """The worst verdict of some numbers of segments; with those it holds for, if it does not hold for all."""
    status, where = worst(results)
    return f"{status} x{','.join(where)}" if where else status


def _cost(results: Sequence[Result]) -> str:
    result = results[-1]
    if result.status in ("error", "hang"):
        return result.status
    cost = f"{shown(result.ratio, '.2f')}, {mebibytes(result.peak_bytes)}"
    return f"({cost})" if result.status == "wrong" else cost


def _reduced(result: Result) -> str | None:
    """The reductions of a gradient in a step, fewest and most."""
    numbers = dict.fromkeys(number for number in (result.least, result.most) if number is not None)
    return "-".join(map(str, numbers)) or None


def _distance(difference: float | None, right: bool | None) -> str | None:
    if not difference:
        return None if difference is None else "exact"
    return f"{difference:.1e}" if right else f"OFF {difference:.0e}"


def _either(yes: str, no: str) -> Callable[[bool], str]:
    return lambda value: yes if value else no


DETAILS = (
    Column("workload", lambda result: result.workload),
    Column("recomputed", recomputed),
    Column("engine", lambda result: short_name(result.engine)),
    Column("verdict", lambda result: result.status if result.right else result.status.upper()),
    Column("ranks", lambda result: result.ranks_equal, _either("equal", "DIFFER")),
    Column("weights", lambda result: _distance(result.difference, result.weights_right)),
    Column("buffers", lambda result: _distance(result.buffer_difference, result.buffers_right)),
    Column("runs", lambda result: result.runs or None),
    Column("bits", lambda result: result.repeatable, _either("equal", "DIFFER")),
    Column("reduced", _reduced),
    Column("order", lambda result: result.same_order, _either("same", "VARIES")),
    Column("step ms", lambda result: result.step_seconds and 1000 * result.step_seconds, ".1f"),
    Column("ratio", lambda result: result.ratio, ".2f"),
    Column("peak MiB", lambda result: result.peak_bytes, in_mib(".2f")),
)
