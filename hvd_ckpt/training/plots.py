"""The picture of training runs: losses over the steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_ckpt.text import one_line
from hvd_ckpt.training import logs

# Okabe and Ito's colours, which people who are colour-blind can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
MARKERS = "osD^v"
LONGEST = 100  # characters of a title or name
MOST = 2**53  # steps
LARGEST = 1e30  # loss that is drawn; a larger one counts as infinite


def loss_plot(
    runs: Mapping[str, str | os.PathLike[str]],
    path: str | os.PathLike[str],
    title: str = "Loss",
) -> None:
    """Draws the training loss of runs over the steps as lines, and evaluations as points.

    Each run is thinner than the one before, with its own dashes, so runs that coincide are all visible. Where a loss is not finite
    there is a gap.

    Args:
        runs: logs (``log.jsonl``), by the name of the run.
        path: of the PNG.
        title: above the picture.

    Raises:
        ValueError: there is no run, a log has no loss, or a line of it is not a record; the message names file and line.
    """
    if not runs:
        raise ValueError("no run to draw: give at least one log")
    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, log) in enumerate(runs.items()):
        _draw_run(axes, number, one_line(name)[:LONGEST], log, alone=len(runs) == 1)
    axes.set_title(one_line(title)[:LONGEST], parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    figure.savefig(Path(path), dpi=120)


def _draw_run(axes: Axes, number: int, name: str, log: str | os.PathLike[str], alone: bool) -> None:
    training, evaluation = _points(log, "train"), _points(log, "eval")
    if not training and not evaluation:
        raise ValueError(f"log '{log}' has no loss to draw")
    color = COLORS[number % len(COLORS)]
    label = f" {name}"  # matplotlib leaves out of a legend what begins with an underscore
    if training:
        axes.plot(
            *zip(*training),
            color=color,
            alpha=0.45 if number == 0 and not alone else 1,
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.6 if alone else max(5 - 2 * number, 1.3),
            marker="." if len(training) == 1 else "",
            label=label,
        )
    if evaluation:
        axes.plot(
            *zip(*evaluation),
            color=color,
            linestyle="",
            marker=MARKERS[number % len(MARKERS)],
            markersize=max(11 - 5 * number, 4),
            markerfacecolor="white" if number == 0 else color,
            label=f"{label}, evaluation",
        )


def _points(log: str | os.PathLike[str], kind: str) -> list[tuple[int, float]]:
    """(step, loss) of the records of one kind."""
    points = []
    for number, record in enumerate(logs.read(log), start=1):
        if record.get("kind") == kind:
            loss: Any = record.get("loss")
            step: Any = record.get("step")
            if type(step) is not int or not 0 <= step <= MOST or type(loss) not in (int, float):
                raise ValueError(
                    f"log '{log}', line {number}: a record of kind {kind} needs a step and a loss"
                )
            points.append((step, loss if abs(loss) < LARGEST else math.nan))
    return points
