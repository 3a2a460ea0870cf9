"""The picture of a wrong recomputation, ``docs/mismatch.png``: an error with a name here, a loss that goes astray elsewhere.

    python docs/draw_mismatch.py

A network of residual blocks learns scikit-learn's digits. Its dropout draws each mask from the number of forward passes, which a
recomputation counts on: its mask is another one, and the gradients are wrong. No exception tells ``torch.utils.checkpoint`` so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.report import save_figure

PICTURE = Path(__file__).resolve().parent / "mismatch.png"
STEPS, BATCH, WIDTH, BLOCKS = 400, 64, 64, 4
SMOOTH = 20  # steps of a running mean

Run = Callable[[nn.Module, Tensor], Tensor]


class CountingBlock(nn.Module):
    """A residual block whose dropout depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        kept = torch.rand(x.shape, generator=generator) > 0.5
        return x + self.net(x * kept * 2)


def train(run: Run) -> tuple[list[float], str]:
    """Losses of a training with blocks that run in this way, and the error that ended it, if one has."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    blocks, head = nn.ModuleList(CountingBlock() for _ in range(BLOCKS)), nn.Linear(WIDTH, 10)
    optimizer = torch.optim.Adam([*blocks.parameters(), *head.parameters()], lr=3e-3)
    losses: list[float] = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        x = images[chosen].float() / 16
        optimizer.zero_grad()
        for block in blocks:
            x = run(block, x)
        loss = functional.cross_entropy(head(x), labels[chosen])
        losses.append(loss.item())
        try:
            loss.backward()
        except hc.RecomputationMismatch as error:
            return losses, str(error)
        optimizer.step()
    return losses, ""


def smooth(losses: list[float]) -> Tensor:
    """Means of the last steps."""
    sums = torch.tensor([0.0, *losses], dtype=torch.float64).cumsum(0)
    steps = torch.arange(1, len(losses) + 1)
    return (sums[1:] - sums[(steps - SMOOTH).clamp(min=0)]) / steps.clamp(max=SMOOTH)


def draw() -> Figure:
    """Trains three times, and draws the losses."""
    torch.set_num_threads(1)
    figure = Figure(figsize=(8, 3.6))
    axes = figure.add_subplot()
    ways: dict[str, tuple[str, Run]] = {
        "torch.utils.checkpoint: no error": (
            "#d1495b",
            lambda block, x: checkpoint(block, x, use_reentrant=False),
        ),
        "no recomputation": ("#1b6ca8", lambda block, x: block(x)),
    }
    for label, (color, run) in ways.items():
        axes.plot(range(1, STEPS + 1), smooth(train(run)[0]), color=color, label=label)
    losses, error = train(lambda block, x: hc.checkpoint(block, x))
    assert error, "the wrong recomputation was not found"
    step, what = len(losses), error.partition(",")[0]
    axes.plot(
        step, losses[-1], "*", color="#2e8b57", markersize=16, label=f"hc.checkpoint: an error in step {step}"
    )
    axes.annotate(
        f"RecomputationMismatch: {what}, ...",
        (step, losses[-1]),
        xytext=(12, -1),
        textcoords="offset points",
        va="center",
        color="#2e8b57",
        fontsize=9,
    )
    axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTH} steps", ylim=(0, None))
    axes.set_title("A dropout that draws another mask when it is recomputed", fontsize=10)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.88), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    save_figure(draw(), PICTURE)
