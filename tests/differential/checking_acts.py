"""Checks of a program in which users act by hand: it ends as in one process, or in one error on every rank, for a reason.

What stock Horovod gets right must be right: an error is accepted only where an act is a race there, or is done to what is in
shards (:func:`may_refuse`). Where it cannot be right, an error is asked for (:func:`must_refuse`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checking import (
    MARGIN,
    NOISES,
    complete,
    differences,
    distance,
    floor_of,
    gather,
    together,
    tolerance_of,
)
from hand import FLAGS, GROUPS, IN_PLACE, READS, REPLACED, STATE, STATE_READ, WEIGHTS, WEIGHTS_READ, common
from interpreter import Run
from programs import Act, Program
from torch import Tensor

import hvd_ckpt as hc

OURS = str(Path(hc.__file__).parent)
IN_STEP = (*READS, *IN_PLACE, *REPLACED)


class Outcome(NamedTuple):
    """How a program ended on a rank.

    Attributes:
        values: weights and buffers; where an error ended it the weights, if they are whole.
        reads: what acts have read.
        refused: kind of the error of each operation that raised one, and whether it is a sentence of this library.
        error: what ended the program, in the same form; None: nothing did.
        step: in which step.
    """

    values: dict[str, Tensor]
    reads: dict[tuple[int, ...], Tensor]
    refused: dict[tuple[int, ...], tuple[str, bool]]
    error: tuple[str, bool] | None
    step: int


def check(program: Program) -> list[str]:
    """Runs a program on the ranks and in one process; returns what is wrong, the same on every rank. Collective."""
    outcome, performed = outcome_of(program)
    everyone = gather(outcome)
    failures = list(_agreement(program, everyone))
    failures += _reasons(program, everyone, performed)
    if not failures and hc.rank() == 0 and not any(drifts(program, act) for _, act in performed):
        failures += _against_one_process(program, everyone)
    return together(failures)


def outcome_of(program: Program) -> tuple[Outcome, list[tuple[int, Act]]]:
    """Runs a program to its end, or to the first error that a collective call raises."""
    run, error, values = Run(program), None, {}
    try:
        for number in range(len(program.steps)):
            run.step(number)
        values = run.result()
    except Exception as raised:
        error = described(raised)
        if program.stage < 3:
            values = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    refused = {key: described(raised) for key, raised in run.hand.refused.items()}
    return Outcome(values, run.hand.reads, refused, error, len(run.seen)), run.hand.done


def described(error: Exception) -> tuple[str, bool]:
    """The kind of an error's message, and whether this library wrote it."""
    text = re.sub(r"^(rank \d+: )+", "", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].filename.startswith(OURS) and " " in str(error)
    ours &= not isinstance(error, (AttributeError, IndexError, NameError))
    return f"{type(error).__name__}: {text}", ours


def kind_of(error: tuple[str, bool]) -> str:
    """An error's message without what differs between ranks."""
    return re.sub(r"'[^']*'|\d+", "_", error[0].partition(": ")[2])[:80]


# ---------------------------------------------------------------------------------- what the ranks have in common


def _agreement(program: Program, everyone: list[Outcome]) -> list[str]:
    kinds = {None if one.error is None else (kind_of(one.error), one.step) for one in everyone}
    if len(kinds) > 1:
        return [f"ranks differ: {[(one.error, one.step) for one in everyone]}"]
    failures = []
    done: dict[tuple[int, ...], set[int]] = {}
    for one in everyone:
        for key in one.refused:
            done.setdefault(key[1:], set()).add(key[0])
    for (step, position, at), ranks in done.items():
        act = program.steps[step].acts[position]
        before = [one for number in range(step + 1) for one in program.steps[number].acts]
        alike = all(len(one.ranks) == program.ranks for one in before if one != act)
        if alike and ranks != set(act.ranks) and act.kind not in STATE_READ:
            failures.append(f"refused on some ranks: {step} {act} parameter {at} on {sorted(ranks)} only")
    if not any(drifts(program, act) for step in program.steps for act in step.acts):
        first = {name: value for name, value in everyone[0].values.items() if not name[0].isdigit()}
        for one in everyone[1:]:
            if any(not torch.equal(value, one.values[name]) for name, value in first.items()):
                failures.append("ranks end with different weights")
                break
    return failures[:3]


def _reasons(program: Program, everyone: list[Outcome], performed: list[tuple[int, Act]]) -> list[str]:
    failures = []
    for one in everyone:
        for key, error in one.refused.items():
            act = program.steps[key[1]].acts[key[2]]
            if not error[1]:
                failures.append(f"unclear error: step {key[1]} {act}: {error[0][:300]}")
            elif not may_refuse(program, key[1], act):
                failures.append(f"refused without cause: step {key[1]} {act}: {error[0][:300]}")
    error, step = everyone[0].error, everyone[0].step
    if error is not None:
        causes = [
            act
            for number, act in performed
            if may_refuse(program, number, act) and (number == step or act.kind not in IN_STEP)
        ]
        hooks = [hook for hook in program.hooks if may_refuse_hook(program, hook)]
        if not all(one.error[1] for one in everyone if one.error is not None):
            failures.append(f"unclear error: step {step}: {error[0][:400]}")
        elif not causes and not hooks:
            failures.append(f"error without cause: step {step}: {error[0][:400]}")
        failures += [
            f"silent: step {number} {act} (error in step {step})"
            for number, act in performed
            if number < step and must_refuse(program, number, act, everyone)
        ]
    else:
        failures += [
            f"silent: step {number} {act}"
            for number, act in performed
            if must_refuse(program, number, act, everyone)
            or (
                drifts(program, act)
                and not freezes(program)
                and not was_refused(program, number, act, everyone)
            )
        ]
    return failures[:4]


# ---------------------------------------------------------------------------------- the rules


def steady(program: Program) -> bool:
    """Whether each parameter accumulates equally often in each step, so that nothing leaves before the last of its gradients."""
    counts = {len(own) for step in program.steps for own in step.passes}
    kinds = {one.kind for one in program.passes}
    acts = {act.kind for step in program.steps for act in step.acts}
    events = any(step.events for step in program.steps)
    return len(counts) == 1 and kinds <= {"plain"} and not events and not acts & set(FLAGS)


def may_be_in_flight(program: Program, number: int, act: Act) -> bool:
    if program.stage > 1:
        return act.place in ("pass", "backward")
    if program.ranks == 1 or number == 0:
        return False
    last = act.part == len(program.steps[number].passes[0]) - 1
    return act.place == "backward" or (act.place == "pass" and (last or not steady(program)))


def may_refuse(program: Program, number: int, act: Act) -> bool:
    """Whether an error is an answer to an act: a race with stock Horovod, or half of what is in shards."""
    if drifts(program, act):
        return True
    kind, place, step = act.kind, act.place, program.steps[number]
    shards = program.stage > 1 and (
        place in ("synchronized", "step")
        or (place == "cleared" and (step.clear in ("zero", "model_zero", "never") or _zeroed(step)))
    )
    flying = may_be_in_flight(program, number, act)
    if kind in READS:
        if kind == "dot" and program.stage == 3:
            return True
        return kind != "is_none" and (flying or shards)
    if kind == "optimizer_zeros":
        return place in ("pass", "backward")  # as in Horovod
    if kind in IN_PLACE:
        return flying or shards or (place == "backward" and program.ranks > 1)
    if kind in REPLACED:
        reads = kind in ("doubled", "cloned", "swapped", "data_set", "collect")
        if reads and shards:
            return True
        drops = kind in ("dropped", "model_none") and len(act.ranks) == program.ranks
        if drops and place == "backward":
            return False
        return flying or (program.stage > 1 and place == "synchronized")
    if kind in (*WEIGHTS, *WEIGHTS_READ):
        return program.stage == 3 and not act.within and kind != "evaluate"
    if kind in (*STATE, *STATE_READ):
        return program.stage > 0 and kind != "state_load" and act.through != "pieces"
    if kind in FLAGS:
        return len(act.ranks) < program.ranks
    return False


def _zeroed(step: Any) -> bool:
    return any(act.kind == "optimizer_zeros" for act in step.acts)


def may_refuse_hook(program: Program, hook: tuple[str, int, bool]) -> bool:
    kind, _, before = hook
    if kind == "pre_mul" or (program.ranks == 1 and program.stage < 2):
        return False
    # One that comes before the optimizer's is refused where it would find the last part of a gradient alone.
    several = program.stage > 1 and any(len(own) > 1 for step in program.steps for own in step.passes)
    return not before or several or not steady(program)


def must_refuse(program: Program, number: int, act: Act, everyone: list[Outcome]) -> bool:
    """Whether a gradient was changed in place between ``backward()`` and ``synchronize()``, as by torch's clipping."""
    if program.ranks == 1 or act.place != "backward" or act.kind not in IN_PLACE:
        return False
    if not any(program.steps[number].passes):
        return False  # there may be no gradients
    if act.kind in ("data_mul_", "model_zeros", "optimizer_zeros", "index"):
        return (
            False  # no version tells of the first; the others drop gradients, or may find nothing to write to
        )
    later = [
        one
        for one in program.steps[number].acts
        if one.place == "backward" and one.kind in (*REPLACED, *IN_PLACE)
    ]
    if len(later) > 1 or act.targets or program.hooks:
        return False  # the gradient may have been replaced, or be none
    frozen = any(one.kind in FLAGS for step in program.steps for one in step.acts) or any(
        event[0] == "freeze" for step in program.steps for event in step.events
    )
    return not frozen and not was_refused(program, number, act, everyone)


def was_refused(program: Program, number: int, act: Act, everyone: list[Outcome]) -> bool:
    keys = {key for one in everyone for key in one.refused if key[1] == number}
    return any(program.steps[number].acts[key[2]] == act for key in keys)


def drifts(program: Program, act: Act) -> bool:
    """Whether an act of some ranks gives them other weights than others have."""
    writes = act.kind in (*WEIGHTS, *GROUPS) and act.kind not in ("average", "away", "back")
    return len(act.ranks) < program.ranks and writes


def freezes(program: Program) -> bool:
    """Whether parameters are frozen. Ranks may differ in these, also where a gradient that was not cleared moves them still."""
    return any(act.kind == "freeze" for step in program.steps for act in step.acts)


# ---------------------------------------------------------------------------------- one process


def _against_one_process(program: Program, everyone: list[Outcome]) -> list[str]:
    refused = {key for one in everyone for key in one.refused}
    left_out = set(refused)
    for _, step, position, at in refused:
        act = program.steps[step].acts[position]
        if common(act):
            left_out.add((act.ranks[0], step, position, at))

    def run(noise: int = 0) -> Run:
        return complete(Run(program, alone=True, noise=noise, refused=left_out))

    alone = run()
    return _differ(program, everyone, alone) and _differ(program, everyone, alone, list(map(run, NOISES)))


def _differ(program: Program, everyone: list[Outcome], alone: Run, noisy: Sequence[Run] = ()) -> list[str]:
    """What is not as in one process, by the least tolerance, or by what roundings did in noisy runs."""
    result, floor = alone.result(), floor_of(program)
    least = tolerance_of(result, floor=floor)
    failures = []
    for rank, one in enumerate(everyone):
        for key, value in one.reads.items():
            if one.error is not None and key[1] >= one.step:
                continue
            wanted = alone.hand.reads.get(key)
            if wanted is None:
                failures.append(f"one process has not read {key} on rank {rank}")
                continue
            size = max(1.0, abs(wanted.item()))
            bound = max(
                [least * size, *(MARGIN * distance(wanted, other.hand.reads[key]) for other in noisy)]
            )
            if not distance(value, wanted) <= bound and str(value.item()) != str(wanted.item()):
                act = "hook" if key[2] < 0 else program.steps[key[1]].acts[key[2]]
                failures.append(
                    f"reads something else: step {key[1]} {act} parameter {key[3]} on rank {rank}: "
                    f"{value.item():.6g}, one process {wanted.item():.6g}"
                )
    if everyone[0].error is None:
        tolerance = tolerance_of(result, [other.result() for other in noisy], floor)
        everything = {name: value for one in everyone for name, value in one.values.items()}
        failures += differences("one process", (everything, []), (result, []), tolerance)
    return failures[:3]
