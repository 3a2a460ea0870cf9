"""What users do by hand, each kind at each place where it is usual, at every stage: programs for :mod:`checking_acts`.

The act is in the third step, so gradients leave in the backward pass; where a step has one pass more than those before it, what
the first pass has added leaves, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from hand import (
    ACTS,
    FLAGS,
    GROUPS,
    HOOKS,
    IN_PLACE,
    READS,
    REPLACED,
    STATE,
    STATE_READ,
    WEIGHTS,
    WEIGHTS_READ,
)
from named import TWICE, WHOLE, Named
from programs import Act, Program

REDUCED = tuple(
    kind for kind in (*READS, *IN_PLACE, *REPLACED) if kind not in ("kept", "collect", "combine", "optimizer_zeros")
)  # fmt: skip
UNREDUCED = (*REDUCED, "optimizer_zeros")
AFTER_A_STEP = (*WEIGHTS, *WEIGHTS_READ, *STATE, *STATE_READ, *GROUPS, *FLAGS, "kept")
OF_PIECES = ("state_zero_", "state_foreach_zero_", "state_pop", "state_empty", "state_clear", "state_new")
DRIFTING = ("weight_mul_", "weight_data_mul_", "weight_data_set", "weight_init", "load_model")


class Case(NamedTuple):
    """An act, or a hook; of all ranks or of one; ``usual`` and ``special`` are the passes of a step, and of that with the act.

    Stages 1 and 3 take parameters from groups, unless ``pieces`` are taken.
    """

    kind: str
    place: str
    stage: int
    one: bool = False
    usual: str = WHOLE
    special: str = WHOLE
    number: int = 2
    offload: bool = False
    pieces: bool = False


def each(kinds: Iterable[str], *stages: int) -> Iterator[tuple[str, int]]:
    """Every kind with half of the stages, the next one with the other half."""
    for number, kind in enumerate(kinds):
        yield from ((kind, stage) for stage in stages[number % 2 :: 2])


def cases() -> Iterator[Case]:
    yield from (Case(kind, "backward", stage) for kind, stage in each(UNREDUCED, 0, 2, 3))
    yield from (
        Case(kind, "pass", stage, usual=TWICE, special=TWICE) for kind, stage in each(UNREDUCED, 0, 2)
    )
    left = [
        kind for kind in UNREDUCED if kind != "swapped"
    ]  # which PyTorch refuses for gradients that have left
    yield from (Case(kind, "pass", stage, special=TWICE) for kind, stage in each(left, 2, 0))
    yield from (Case(kind, "synchronized", stage) for kind, stage in each(REDUCED, 0, 2))
    yield from (Case(kind, "backward", stage, one=True) for kind, stage in each((*REDUCED, *FLAGS), 0, 2))
    yield from (Case(kind, "backward", stage, number=0) for kind, stage in each(IN_PLACE, 0, 2))
    yield from (
        Case(kind, "pass", stage, usual=TWICE, special=TWICE) for kind, stage in each(FLAGS, 0, 1, 2, 3)
    )
    yield from (Case(kind, "step", stage) for kind, stage in each(AFTER_A_STEP, 0, 1, 2, 3))
    yield from (Case(kind, "step", 3) for kind in list(WEIGHTS)[::2])  # the others are above
    for offload in (False, True):
        yield from (
            Case(kind, "step", stage, offload=offload, pieces=True)
            for kind, stage in each(OF_PIECES, 1, 2, 3)
        )
    yield from (Case("state_load", "step", stage, offload=True) for stage in (1, 2))
    yield from (Case(kind, "step", stage, one=True) for kind, stage in each(DRIFTING, 0, 1, 2, 3))
    # What shows is the last part alone.
    yield from (Case(kind, "backward", 0, special=TWICE) for kind in ("clip_norm", "dropped"))
    yield from (
        Case(kind, place, stage, usual=passes, special=passes, number=0)
        for place, passes in product(("unwrapped", "wrapped"), (WHOLE, TWICE))
        for kind, stage in each(HOOKS, 0, 2)
    )


def program(case: Case, ranks: int) -> Program:
    """The program of a case."""
    act = Act(
        case.kind,
        case.place,
        (ranks - 1,) if case.one else tuple(range(ranks)),
        targets=(2,) if case.kind in HOOKS else (),
        within=case.kind in ACTS["weights"] and case.kind != "evaluate" and case.stage == 3,
        through="pieces" if case.pieces else "groups" if case.stage in (1, 3) else "module",
        pause=0.01 if case.place == "backward" else 0.0,
    )
    plain = {"how": "synchronize" if case.place == "synchronized" else "step"}
    steps = [
        (case.special, {**plain, "acts": (act,)}) if number == case.number or case.kind == "kept" else (case.usual, plain)
        for number in range(8 if case.kind in DRIFTING and case.one else 4)
    ]  # fmt: skip
    options = {"offload": "optimizer"} if case.offload else {}
    named = Named(
        steps, "linear deep linear+frozen unused", resume=0, options=options, more={"optimizer": "adamw"}
    )
    return named.program(ranks, case.stage)
