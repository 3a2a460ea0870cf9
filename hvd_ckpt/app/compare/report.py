"""The report of a comparison: which engine is right in which cell, what it costs, and every cell in detail.

The first two tables have a column for each engine; the numbers of segments share one entry as long as the verdict is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_ckpt.app.compare.catalog import PARTS, STAGES
from hvd_ckpt.app.compare.cells import find_variant
from hvd_ckpt.app.compare.parts import LEGEND as PART_LEGEND
from hvd_ckpt.app.compare.runner.cases import Column, in_mib, table_of
from hvd_ckpt.app.compare.runner.engines import find_engine
from hvd_ckpt.app.compare.runner.report import Report, Table, mebibytes, shown
from hvd_ckpt.app.compare.stages import CHUNKS
from hvd_ckpt.app.compare.verdict import (
    BASELINE,
    SEVERITY,
    Result,
    by_variant,
    engines_of,
    recomputed,
    short_name,
    worst,
)

REASON = 160  # characters
STYLES = {"right": "green", "loose": "yellow", "-": "dim"}
PRICE = (
    "Step time as a ratio to stock Horovod without recomputation, and peak memory in MiB. A wrong result has its price in "
    "parentheses."
)
LEGEND = (
    "recomputed: the checkpoint variant and the number of segments.",
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
)
PLANNED = (
    "plan: `hvd_ckpt.plan` chose what is recomputed for that budget, which limits the peak of a step above its start; peak MiB "
    "counts from before the model is made. Other engines have no plans."
)
STAGE_LEGEND = (
    "right: parameters and buffers of every stage equal, to rounding, those of the whole model in one process, which runs the same "
    "micro-batches one after the other, and two runs end in the same bits. wrong: they do not. error, hang: no result.",
    "torch: torch.distributed.pipelining over Gloo, with the model cut by hand; where blocks that are not neighbours are "
    "connected, cut by its tracer.",
    "deepspeed: PipelineModule of DeepSpeed over Gloo, where it is installed; connected blocks hand on tuples.",
    "dropout: the masks are those that the whole model draws with seed_blocks(). Other masks are not wrong for training; the "
    "result then depends on the number of stages.",
)


def conclude(results: Sequence[Result], subject: str) -> tuple[bool, str]:
    """Whether the subject is right in every cell, and a sentence that says where it is not."""
    mine = [result for result in results if result.engine == subject]
    wrong = [result for result in mine if not result.right]
    if not mine:
        return False, f"{subject} has no cells to be right in."
    if not wrong:
        return True, f"{subject} is right in all {len(mine)} cells."
    names = ", ".join(f"{result.workload} {recomputed(result)}" for result in wrong)
    return False, f"{subject} is not right in {len(wrong)} of {len(mine)} cells: {names}."


def make_report(
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    subject: str,
    settings: dict[str, Any],
    facts: dict[str, str],
    absent: Mapping[str, str],
    left_out: Sequence[str],
) -> Report:
    """The report of a comparison.

    Args:
        results: one per engine and cell.
        workloads: for each workload its ``title``, ``line``, the reference's mean ``losses``, and whether it is ``small``.
        subject: the engine that must be right for the comparison to succeed.
        settings: of the comparison, as plain values.
        facts: of the machine, and the settings.
        absent: engines that cannot run here, and why.
        left_out: a line for each cell that an engine did not train: which, and why.
    """
    success, conclusion = conclude(results, subject)
    large = [result for result in results if not workloads[result.workload].get("small")]
    title = f"{settings['np']} ranks over {settings['controller']}, {settings['precision']}"

    def draw(folder: Any) -> list[str]:
        from hvd_ckpt.app.compare.pictures import draw_all

        return draw_all(folder, results, large, workloads, title)

    planned = any(find_variant(result.variant).budget for result in results)
    return Report(
        "Engines compared",
        facts,
        [_verdicts(results, title), *([_price(large)] if large else []), *_trained(workloads)],
        [
            {**dataclasses.asdict(result), "right": result.right, "step_seconds": result.step_seconds}
            for result in results
        ],
        remarks=[
            *(f"{engine} is absent: {reason}" for engine, reason in absent.items()),
            *left_out,
            *_reasons(results, subject),
        ],
        notes=[*LEGEND, *([PLANNED] if planned else [])],
        details=[table_of(DETAILS, results, "Every cell")],
        detail_remarks=list(_reasons(results)),
        draw=draw,
        settings=settings,
        data={
            "right": success,
            "conclusion": conclusion,
            "subject": subject,
            "workloads": workloads,
            "absent": absent,
            "left_out": left_out,
        },
        conclusion=conclusion,
        success=success,
    )


def make_stage_report(
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    subject: str,
    settings: dict[str, Any],
    facts: dict[str, str],
) -> Report:
    """The report of a comparison in pipeline stages, or in parts of layers, as :func:`make_report`, with a column for each engine
    and variant."""
    in_parts = results[0].workload.startswith(PARTS)
    begin, what, legend = (PARTS, "parts", PART_LEGEND) if in_parts else (STAGES, "stages", STAGE_LEGEND)
    engines, names = engines_of(results), list(workloads)
    ordered = sorted(results, key=lambda found: (names.index(found.workload), engines.index(found.engine)))
    verdicts = [
        {
            "scenario": result.workload.removeprefix(begin),
            "engine": f"{find_engine(result.engine).title}, {result.variant}",
            "status": result.status,
            "reason": result.reason,
        }
        for result in ordered
    ]
    scenarios = {name.removeprefix(begin): workload["title"] for name, workload in workloads.items()}
    columns = ("scenario", "what is hard", *dict.fromkeys(verdict["engine"] for verdict in verdicts))
    rows = [
        (name, title, *(verdict["status"] for verdict in verdicts if verdict["scenario"] == name))
        for name, title in scenarios.items()
    ]
    chosen = {name: settings[name] for name in ("controller", "steps", "seed")}
    chosen = {what: settings["np"], **chosen, **({} if in_parts else {"chunks": CHUNKS})}
    machine = {name: fact for name, fact in facts.items() if name not in settings}
    return Report(
        "Parts of layers compared" if in_parts else "Pipeline stages compared",
        {**machine, **{name: str(value) for name, value in chosen.items()}},
        [
            Table(
                columns,
                rows,
                title=f"Verdicts: {settings['np']} {what} over {settings['controller']}",
                left=columns,
                style=lambda entry: STYLES.get(entry, "red" if entry in SEVERITY else ""),
                mark=_mark,
            )
        ],
        results=verdicts,
        remarks=[
            "{scenario}, {engine}: {status}, {reason}".format(**verdict)
            for verdict in verdicts
            if verdict["reason"]
        ],
        notes=legend,
        settings=chosen,
        success=all(result.right for result in results if result.engine == subject),
    )


def _mark(entry: str) -> str:
    """An entry of a table of verdicts as Markdown."""
    return f"**{entry}**" if entry.startswith(SEVERITY[2:]) else entry


def _reasons(results: Iterable[Result], engine: str | None = None) -> Iterable[str]:
    """One line for each result that is not right (of one engine, or of all): where, and why. Long reasons are cut."""
    for result in results:
        if not result.right and engine in (None, result.engine):
            reason = textwrap.shorten(result.reason, REASON, placeholder=" ...")
            yield f"{result.engine}, {result.workload} {recomputed(result)}: {result.status}, {reason}"


def _verdicts(results: Sequence[Result], title: str) -> Table:
    """Who is right where: a row for each workload and variant."""
    groups, engines = by_variant(results), engines_of(results)
    columns = ("workload", "recomputed", *map(short_name, engines))
    rows = [(*names, *(_verdict(row.get(engine, [])) for engine in engines)) for names, row in groups.items()]
    return Table(
        columns,
        rows,
        title=f"Verdicts: {title}",
        left=columns,
        folded=1,
        style=functools.partial(_style, names={name for names in groups for name in names}),
        mark=_mark,
    )


def _style(entry: str, names: set[str]) -> str:
    return "" if entry in names or not entry else STYLES.get(entry.split()[0], "red")


def _verdict(results: Sequence[Result]) -> str:
    """The worst verdict of some numbers of segments; with those it holds for, if it does not hold for all."""
    if not results:
        return "-"
    status, where = worst(results)
    return f"{status} x{','.join(where)}" if where else status


def _price(results: Sequence[Result]) -> Table:
    engines = engines_of(results)
    cells: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        cells.setdefault((result.workload, recomputed(result)), {})[result.engine] = result
    rows = [
        (*names, *(_cost(row[engine]) if engine in row else "-" for engine in engines))
        for names, row in cells.items()
    ]
    columns = ("workload", "recomputed", *map(short_name, engines))
    return Table(columns, rows, title="Step time and peak memory", left=columns[:2], folded=1, note=PRICE)


def _cost(result: Result) -> str:
    if result.status in ("error", "hang"):
        return result.status
    peak = mebibytes(result.peak_bytes)
    cost = f"{shown(result.ratio, '.2f')}, {peak}"
    return f"({cost})" if result.status == "wrong" else cost


def _trained(workloads: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    rows: list[tuple[str, ...]] = [
        (name, found["title"], found["line"], f"{found['losses'][0]:.3f} to {found['losses'][-1]:.3f}")
        for name, found in workloads.items()
    ]
    return [Table(("workload", "what is trained", "size", "loss"), rows, title="Workloads", printed=False)]


def _reduced(result: Result) -> str | None:
    """The reductions of a gradient in a step, fewest and most."""
    if result.most is None or result.least in (None, result.most):
        return None if result.most is None else str(result.most)
    return f"{result.least}-{result.most}"


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
    Column(
        "runs",
        lambda result: None if result.repeatable is None else (result.runs, result.repeatable),
        lambda runs: f"{runs[0]} {'equal' if runs[1] else 'DIFFER'}",
    ),
    Column("reduced", _reduced),
    Column("order", lambda result: result.same_order, _either("same", "VARIES")),
    Column("step ms", lambda result: result.step_seconds and 1000 * result.step_seconds, ".1f"),
    Column("ratio", lambda result: result.ratio, ".2f"),
    Column("peak MiB", lambda result: result.peak_bytes, in_mib(".2f")),
)
