"""Local SGD and DiLoCo beside synchronous training: the loss after equally many tokens, bytes sent, and steps on a slow link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Suite
from hvd_ckpt.app.compare.runner.workloads import Gpt

STRIDE = 7919  # windows from one sample to the next; prime, so that all windows have their turn
HELD_OUT = 512  # windows, the last ones


@dataclass(frozen=True)
class Text(Gpt):
    """A GPT on the bytes of a text, a file or by default the source text of Python's library."""

    name: ClassVar[str] = "text"
    changes: ClassVar[bool] = True

    text: str = ""

    @property
    def tokens(self) -> Any:
        return _tokens(self.text)

    def windows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows of the text."""
        starts = [number * self.length for number in numbers]
        cut = [self.tokens[start : start + self.length + 1].astype("int64") for start in starts]
        tokens = torch.stack([torch.from_numpy(window) for window in cut])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def draw(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        trained = (len(self.tokens) - 1) // self.length - HELD_OUT
        first = number * self.batch
        return self.windows([(seed + each) * STRIDE % trained for each in range(first, first + self.batch)])

    def held_out(self) -> tuple[Tensor, Tensor]:
        every = (len(self.tokens) - 1) // self.length
        return self.windows(range(every - HELD_OUT, every))


@cache
def _tokens(text: str) -> Any:
    from hvd_ckpt.app.datasets.tokens import Tokens

    return Tokens(text or None).array


def throttle(case: Case) -> Sequence[str]:
    """The words of a command within which the loopback network passes what its ranks together may send; as root on Linux."""
    if not case.at["link"]:
        return ()
    script = (
        f"ip link set lo mtu 9000 up && tc qdisc add dev lo root tbf rate {case.np * case.at['link']}mbit burst 128kb "
        'limit 8mb && exec "$@"'
    )
    # The last word is the script's $0. The command that follows becomes its "$@".
    return ["unshare", "--net", "sh", "-c", script, "sh"]


def spread(row: Row, rows: Sequence[Row]) -> Any:
    """The largest loss of a seed minus the smallest."""
    return f"{max(row.losses) - min(row.losses):.4f}" if row.losses else None


def sent_by_synchronous(row: Row, rows: Sequence[Row]) -> Any:
    """How many times the bytes synchronous training sends."""
    other = row.peer(rows, "hvd_ckpt")
    return other.peak_ratio(row, "sent") if other is not None and row.over("sent") else None


local = Suite(
    name="local",
    title="Local SGD beside synchronous training",
    help="""Train a GPT on text synchronously, with local SGD and with DiLoCo, and compare losses, bytes and seconds.

    All methods see the same tokens in the same order; each round has another seed. With --link, ranks run in a network namespace
    whose loopback network passes so many Mbit/s for each of them, which needs root on Linux and the commands unshare, ip and tc.
    """,
    engines=(
        *("hvd_ckpt", "local-10", "local-50", "averager", "diloco-10", "diloco-50", "diloco-100", "torchft"),
        *("fragments-50", "int8-50"),
    ),
    workloads={"text": ""},
    kinds={"text": f"{__name__}:Text"},
    columns=("loss", "sent"),
    against={
        "of hvd_ckpt": "hvd_ckpt",
        "spread": spread,
        "sent by hvd_ckpt": sent_by_synchronous,
    },
    axes={"link": Axis("Mbit/s of each rank.", {"none": 0, "100": 100, "10": 10}, "none")},
    sizes={"text": {"batch": 4, "length": 32, "width": 128, "layers": 2, "vocabulary": 320}},
    quick_sizes={"text": {"batch": 4, "length": 16, "width": 16, "heads": 2, "layers": 1, "vocabulary": 320}},
    within=throttle,
    rounds=3,
    steps=800,
    quick={"rounds": 1, "steps": 50},
    average=statistics.fmean,
    optimizer="AdamW",
    cosine=True,
    threads=1,
    notes=(
        "step ms: the mean of a run. loss: of the mean of the ranks' weights after the last step, on samples that are not trained "
        "on, mean over seeds; spread: the largest of a seed minus the smallest.",
    ),
)
