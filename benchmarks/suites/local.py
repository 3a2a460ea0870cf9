"""Train a GPT on text synchronously, with local SGD and with DiLoCo, and compare losses, bytes and seconds.

All methods see the same tokens in the same order; each round has another seed. With --link, ranks run in a network namespace
whose loopback network passes so many Mbit/s for each of them, which needs root on Linux and the commands unshare, ip and tc.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Place, Suite


def throttle(case: Case) -> Place:
    """The words of a command within which the loopback network passes what its ranks together may send; as root on Linux."""
    if case.at["link"] == "none":
        return (), ()
    rate = case.np * int(case.at["link"])
    script = (
        f"ip link set lo mtu 9000 up && tc qdisc add dev lo root tbf rate {rate}mbit burst 128kb "
        'limit 8mb && exec "$@"'
    )
    # The last word is the script's $0. The command that follows becomes its "$@".
    return ["unshare", "--net", "sh", "-c", script, "sh"], ()


def spread(row: Row, rows: Sequence[Row]) -> Any:
    """The largest loss of a seed minus the smallest."""
    return f"{max(row.losses) - min(row.losses):.4f}" if row.losses else None


def sent_by_synchronous(row: Row, rows: Sequence[Row]) -> Any:
    """How many times the bytes synchronous training sends."""
    other = row.peer(rows, "hvd_ckpt")
    return other.peak_ratio(row, "sent") if other is not None and row.over("sent") else None


local = Suite(
    engines=(
        *("hvd_ckpt", "local-10", "local-50", "averager", "diloco-10", "diloco-50", "diloco-100"),
        *("fragments-50", "int8-50"),
    ),
    workloads=("text",),
    columns=("loss", "sent"),
    against={"of hvd_ckpt": "hvd_ckpt", "spread": spread, "sent by hvd_ckpt": sent_by_synchronous},
    axes={"link": Axis("Mbit/s of each rank.", ("none", "100", "10"), "none")},
    sizes={"text": {"batch": 4, "length": 32, "width": 128, "layers": 2, "vocabulary": 320}},
    quick_sizes={"text": {"batch": 4, "length": 16, "width": 16, "heads": 2, "layers": 1, "vocabulary": 320}},
    within=throttle,
    rounds=3,
    steps=800,
    quick={"np": "2", "rounds": 1, "steps": 50},
    average=statistics.fmean,
    optimizer="AdamW",
    cosine=True,
    threads=1,
    notes=(
        "step ms: the mean of a run. loss: of the mean of the ranks' weights after the last step, on samples that are not trained "
        "on, mean over seeds; spread: the largest of a seed minus the smallest.",
    ),
)
