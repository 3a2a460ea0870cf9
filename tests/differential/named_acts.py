"""What users do by hand, each kind at each place where it is usual, at every stage: programs for :mod:`checking_acts`.

The act is in the third step, so gradients leave in the backward pass; where a step has one pass more than those before it, what
the first pass has added leaves, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hand import ACTS, FLAGS, GROUPS, HOOKS, IN_PLACE, OF_GRADIENTS, WEIGHTS
from named import TWICE, WHOLE, Named
from programs import Act, Program

REDUCED = [kind for kind in OF_GRADIENTS if kind not in ("kept", "collect", "combine", "optimizer_zeros")]
UNREDUCED = (*REDUCED, "optimizer_zeros")
AFTER_A_STEP = (*ACTS["weights"], *ACTS["state"], *GROUPS, *FLAGS, "kept")
OF_PIECES = ("state_zero_", "state_foreach_zero_", "state_pop", "state_empty", "state_clear", "state_new")
DRIFTING = ("weight_mul_", "weight_data_mul_", "weight_data_set", "weight_init", "load_model")


class Case(NamedTuple):
    """An act of all ranks or of one; ``usual`` and ``special`` are the passes of a step, and of that with the act.

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


def each(place: str, kinds: Iterable[str], *stages: int, **changes: object) -> Iterator[Case]:
    """Every kind with half of the stages, the next one with the other half."""
    for number, kind in enumerate(kinds):
        yield from (Case(kind, place, stage, **changes) for stage in stages[number % 2 :: 2])


def cases() -> Iterator[Case]:
    yield from each("backward", UNREDUCED, 0, 2, 3)
    yield from each("pass", UNREDUCED, 0, 2, usual=TWICE, special=TWICE)
    # PyTorch refuses to swap gradients that have left.
    yield from each("pass", [kind for kind in UNREDUCED if kind != "swapped"], 2, 0, special=TWICE)
    yield from each("synchronized", REDUCED, 0, 2)
    yield from each("backward", (*REDUCED, *FLAGS), 0, 2, one=True)
    yield from each("backward", IN_PLACE, 0, 2, number=0)
    yield from each("pass", FLAGS, 0, 1, 2, 3, usual=TWICE, special=TWICE)
    yield from each("step", AFTER_A_STEP, 0, 1, 2, 3)
    yield from (Case(kind, "step", 3) for kind in list(WEIGHTS)[::2])  # the others are above
    for offload in (False, True):
        yield from each("step", OF_PIECES, 1, 2, 3, offload=offload, pieces=True)
    yield from (Case("state_load", "step", stage, offload=True) for stage in (1, 2))
    yield from each("step", DRIFTING, 0, 1, 2, 3, one=True)
    # What shows is the last part alone.
    yield from (Case(kind, "backward", 0, special=TWICE) for kind in ("clip_norm", "dropped"))
    for place in ("unwrapped", "wrapped"):
        for passes in (WHOLE, TWICE):
            yield from each(place, HOOKS, 0, 2, usual=passes, special=passes, number=0)


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
        (case.special, {**plain, "acts": (act,)}) if case.kind == "kept" or number == case.number else (case.usual, plain)
        for number in range(8 if case.kind in DRIFTING and case.one else 4)
    ]  # fmt: skip
    options = {"offload": "optimizer"} if case.offload else {}
    named = Named(
        steps, "linear deep linear+frozen unused", resume=0, options=options, more={"optimizer": "adamw"}
    )
    return named.program(ranks, case.stage)
