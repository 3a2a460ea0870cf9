"""The picture of a training run: its loss over the steps, alone or beside that of other runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"pictures need matplotlib ({error}): pip install hvd_ckpt[comparison]") from error

from hvd_ckpt.training import logs

__all__ = ["loss_plot"]

# Okabe and Ito's colours, which people who are colour-blind can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
MARKERS = "osD^v"


def loss_plot(
    runs: Mapping[str, str | os.PathLike[str]],
    path: str | os.PathLike[str],
    title: str = "Loss",
) -> None:
    """Draws the training loss of runs over the steps as lines, and evaluations as points.

    Each run is thinner than the one before, with dashes of its own, so runs that coincide are all seen. Where a loss is not finite
    there is a gap.

    Args:
        runs: logs as :class:`hvd_ckpt.training.logs.JsonLines` writes them, by the name of the run.
        path: of the PNG.
        title: above the picture.

    Raises:
        ValueError: there is no run, a log has no loss, or a line of it is no record; the message names file and line.
    """
    if not runs:
        raise ValueError("no run to draw: give at least one log")
    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, log) in enumerate(runs.items()):
        _draw_run(axes, number, name, log, alone=len(runs) == 1)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(os.fspath(path), dpi=120)


def _draw_run(axes: Axes, number: int, name: str, log: str | os.PathLike[str], alone: bool) -> None:
    training, evaluation = _points(log, "train"), _points(log, "eval")
    if not training and not evaluation:
        raise ValueError(f"log '{log}' has no loss to draw")
    color = COLORS[number % len(COLORS)]
    if training:
        axes.plot(
            *zip(*training),
            color=color,
            alpha=0.45 if number == 0 and not alone else 1,
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.6 if alone else max(5 - 2 * number, 1.3),
            marker="." if len(training) == 1 else "",
            label=name,
        )
    if evaluation:
        axes.plot(
            *zip(*evaluation),
            color=color,
            linestyle="",
            marker=MARKERS[number % len(MARKERS)],
            markersize=max(11 - 5 * number, 4),
            markerfacecolor="white" if number == 0 else color,
            label=f"{name}, evaluation",
        )


def _points(log: str | os.PathLike[str], kind: str) -> list[tuple[int, float]]:
    """(step, loss) of the records of one kind."""
    points = []
    for number, record in enumerate(logs.read(log), start=1):
        if record.get("kind") == kind:
            loss = record.get("loss")
            if "step" not in record or isinstance(loss, bool) or not isinstance(loss, (int, float)):
                raise ValueError(
                    f"log '{log}', line {number}: a record of kind {kind} needs a step and a loss"
                )
            points.append((record["step"], float(loss)))
    return points
