"""The picture of a training run: its loss over the steps, alone or beside that of other runs."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_ckpt.names import one_line
from hvd_ckpt.training import logs

__all__ = ["loss_plot"]

# Okabe and Ito's colours, which people who are colour-blind can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
MARKERS = "osD^v"
LONGEST = 100  # characters of a title or name
MOST = 2**53  # steps
LARGEST = 1e30  # loss that is drawn; a larger one is as good as infinite


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
        _draw_run(axes, number, _verbatim(name), log, alone=len(runs) == 1)
    axes.set_title(_verbatim(title))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    _save(figure, Path(path))


def _save(figure: Figure, path: Path) -> None:
    """The file is there whole or not at all, and a link of its name leads nowhere else."""
    whole = path.with_name(f".{secrets.token_hex(8)}.png")
    try:
        figure.savefig(whole, dpi=120)
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


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


def _verbatim(text: str) -> str:
    """A text that is drawn as it is: no formula, no entry that a legend leaves out, one line of a length that fits."""
    text = one_line(text)[:LONGEST].replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _points(log: str | os.PathLike[str], kind: str) -> list[tuple[int, float]]:
    """(step, loss) of the records of one kind."""
    points = []
    for number, record in enumerate(logs.read(log), start=1):
        if record.get("kind") == kind:
            loss: Any = record.get("loss")
            step: Any = record.get("step")
            if not _is_number(step) or not 0 <= step <= MOST or not _is_number(loss):
                raise ValueError(
                    f"log '{log}', line {number}: a record of kind {kind} needs a step and a loss"
                )
            points.append((step, loss if abs(loss) < LARGEST else math.nan))
    return points


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
