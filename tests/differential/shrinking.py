"""Programs that are smaller than one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from programs import Block, Pass, Program, Step


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    for at in range(len(program.steps)):
        if len(program.steps) > 1:
            join = tuple(min(steps, len(program.steps) - 1) for steps in program.join)
            yield dataclasses.replace(program, steps=_without(program.steps, at), join=join, resume=0)
    for number, segment in enumerate(program.segments):
        for simple in ({"recompute": "keep"}, {"carrier": "tensor"}):
            yield from _replaced(program, "segments", number, segment, simple)
        if segment.blocks != (Block("linear"),) and not program.has_blocks("again", "tied"):
            traps = any(one.trap for one in program.passes)
            if len(segment.blocks) > 1 and not traps:
                for at in range(len(segment.blocks)):
                    yield from _replaced(
                        program, "segments", number, segment, {"blocks": _without(segment.blocks, at)}
                    )
            for at in range(len(segment.blocks)):
                blocks = tuple(Block("linear") if n == at else one for n, one in enumerate(segment.blocks))
                yield from _replaced(program, "segments", number, segment, {"blocks": blocks})
    for name, plain in _PLAIN.items():
        if getattr(program, name) != plain:
            yield dataclasses.replace(program, **{name: plain})
    for option in program.options:
        options = {name: value for name, value in program.options.items() if name != option}
        yield dataclasses.replace(program, options=options)
    for number, step in enumerate(program.steps):
        for at in range(len(step.events)):
            if step.events[at][0] != "group":
                yield from _replaced(program, "steps", number, step, {"events": _without(step.events, at)})
        for name, plain in (("how", "step"), ("clear", "none"), ("by_hand", False), ("drop", ())):
            yield from _replaced(program, "steps", number, step, {name: plain})
        for at, act in enumerate(step.acts):
            yield from _replaced(program, "steps", number, step, {"acts": _without(step.acts, at)})
            for simple in (
                {"targets": act.targets[:1]},
                {"through": "module"},
                {"within": False},
                {"pause": 0.0},
            ):
                acts = (*step.acts[:at], dataclasses.replace(act, **simple), *step.acts[at + 1 :])
                yield from _replaced(program, "steps", number, step, {"acts": acts})
        yield from _fewer_passes(program, number, step)


_PLAIN: dict[str, Any] = {
    "resume": 0, "default_dtype": "float32", "math_kernel": False, "optimizer": "sgd", "embedding": "", "join": (),
    "hooks": (), "scaler": False,
}  # fmt: skip


def _fewer_passes(program: Program, number: int, step: Step) -> Iterator[Program]:
    first = Pass(tuple(range(len(program.segments))))
    yield from _replaced(program, "steps", number, step, {"passes": ((first,),) * program.ranks})
    for rank, passes in enumerate(step.passes):
        for at in range(len(passes) if len(passes) > 1 else 0):
            fewer = tuple(_without(own, at) if n == rank else own for n, own in enumerate(step.passes))
            yield from _replaced(program, "steps", number, step, {"passes": fewer})


def _replaced(program: Program, name: str, at: int, part: Any, changes: dict[str, Any]) -> Iterator[Program]:
    new = dataclasses.replace(part, **changes)
    if new != part:
        parts = getattr(program, name)
        yield dataclasses.replace(program, **{name: (*parts[:at], new, *parts[at + 1 :])})


def _without(values: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*values[:at], *values[at + 1 :])
