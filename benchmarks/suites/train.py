"""Time what `hvd-ckpt train` adds to a step, beside a loop written by hand with the same calls.

Both train the same model on the same batches, in jobs that alternate, and come to the same weights bit for bit. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Row
from benchmarks.suite import Axis, Suite


def same_weights(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether weights and buffers are, bit for bit, those of the other loop after the same steps, on every rank."""
    same = row.same(row.peer(rows, "by-hand"), "hash")
    return None if same is None else "yes" if all(same) else "no"


train = Suite(
    engines=("trainer", "by-hand"),
    workloads=("bert-mini", "gpt-tiny"),
    against={"of by-hand": "by-hand", "same weights": same_weights},
    axes={"accumulate": Axis("Micro-batches of a batch.", ("1", "2", "4"), "1,4")},
    sizes={name: {"batch": 4} for name in ("bert-mini", "gpt-tiny")},
    np="2",
    rounds=9,
    steps=40,
    quick={"rounds": 1, "steps": 4, "workloads": "gpt-tiny"},
    sound=lambda row, rows: same_weights(row, rows) != "no",
    measure="benchmarks.measures.train:measure",
    notes=(
        "trainer: Trainer.run as it is, with its loader, schedule, micro-batches, report, log file and a log entry over all ranks "
        "every 10 steps; no evaluation.",
        "by-hand: the same calls, loader, data set and model: learning rate from the schedule, zero_grad, one sum of "
        "the number of terms over the ranks, forward pass, loss and backward pass of each micro-batch weighed by its terms, "
        "synchronize, clip_grad_norm_, step; loss.item() as often as the trainer logs. It writes and prints nothing.",
    ),
)
