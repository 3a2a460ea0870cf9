"""Trains architectures on the ranks of a job with sharded parameters, and compares with the run that is not sharded."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator

from checks import Architecture, Untrainable, draw as draw_architecture, subject_of, told
from modes import classify, compare, train

import hvd_ckpt as hc

MODE = "stage 3"
ORDER = ("untrainable", "error", "wrong", "memory", "refused", "rounding", "equal")


def draw(seed: int | str, ranks: int, tensor: int) -> Architecture:
    """The architecture of a number or a name."""
    return draw_architecture(seed, ranks, tensor)._replace(modes=(MODE,))


def check(case: Architecture) -> Iterator[str]:
    """What is not right, after a row of the table. Collective."""
    began = time.monotonic()
    outcome, detail = outcome_of(case.name)
    seconds = round(time.monotonic() - began, 1)
    return told(case, [{"mode": MODE, "outcome": outcome, "detail": detail, "seconds": seconds}])


def outcome_of(name: str) -> tuple[str, str]:
    """``equal``, ``rounding``, ... of an architecture on these ranks, and the detail; the same on every rank. Collective."""
    mine = ("", "")
    try:
        subject = subject_of(name)
    except Exception as error:
        mine = ("untrainable", str(error) if isinstance(error, Untrainable) else repr(error))
    results = hc.allgather_object(mine)
    if not any(outcome for outcome, _ in results):
        try:
            (kept, _), (sharded, _) = (train(subject, shard=shard) for shard in ("none", "parameters"))
            mine = compare(sharded, kept)
        except Exception as error:
            traceback.print_exc()  # the other ranks may wait for this one
            mine = classify(error)
        results = hc.allgather_object(mine)
    return min((result for result in results if result[0]), key=lambda result: ORDER.index(result[0]))
