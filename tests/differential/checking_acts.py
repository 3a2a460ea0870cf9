"""Checks of a program in which users act by hand: it ends as in one process, or in one error on every rank, for a reason.

What stock Horovod gets right must be right: an error is accepted only where an act is a race there, or is done to what is in
shards (:func:`may_refuse`). Where it cannot be right, an error is asked for (:func:`must_refuse`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    weights_of,
)
from hand import ACTS, FLAGS, GROUPS, HOOKS, IN_PLACE, OF_GRADIENTS, READS, REPLACED, WEIGHTS, Key, common
from interpreter import Run
from programs import Act, Program
from reference import InOneProcess
from torch import Tensor

import hvd_ckpt as hc

OURS = str(Path(hc.__file__).parent)
Acts = list[tuple[int, Act]]
"""Acts with their steps."""


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
    reads: dict[Key, Tensor]
    refused: dict[Key, tuple[str, bool]]
    error: tuple[str, bool] | None
    step: int


def check(program: Program) -> list[str]:
    """Runs a program on the ranks and in one process; returns what is wrong, the same on every rank. Collective."""
    outcome, performed = outcome_of(program)
    everyone = gather(outcome)
    failures = [*_agreement(program, everyone), *_reasons(program, everyone, performed)]
    if not failures and hc.rank() == 0 and not any(drifts(program, act) for _, act in performed):
        failures += _against_one_process(program, everyone)
    return together(failures)


def outcome_of(program: Program) -> tuple[Outcome, Acts]:
    """Runs a program to its end, or to the first error that a collective call raises."""
    run, error, values = Run(program), None, {}
    try:
        values = complete(run).result()
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


# ---------------------------------------------------------------------------------- what the ranks have in common


def _agreement(program: Program, everyone: list[Outcome]) -> list[str]:
    def kind_of(one: Outcome) -> str | None:
        """An error without what differs between ranks."""
        return one.error and re.sub(r"'[^']*'|\d+", "_", one.error[0].partition(": ")[2])[:80]

    if len({(kind_of(one), one.step if one.error else 0) for one in everyone}) > 1:
        return [f"ranks differ: {[(one.error, one.step) for one in everyone]}"]
    failures = []
    for step, position, at in dict.fromkeys(key[1:] for one in everyone for key in one.refused):
        act = program.steps[step].acts[position]
        ranks = {rank for rank, one in enumerate(everyone) if (rank, step, position, at) in one.refused}
        before = [one for earlier in program.steps[: step + 1] for one in earlier.acts]
        alike = all(len(one.ranks) == program.ranks for one in before if one != act)
        if alike and ranks != set(act.ranks) and act.kind not in ("state_norm", "state_keys"):
            failures.append(f"refused on some ranks: {step} {act} parameter {at} on {sorted(ranks)} only")
    if not any(drifts(program, act) for act in program.acts):
        weights = [weights_of(one.values) for one in everyone]
        if any(not torch.equal(own[name], value) for own in weights for name, value in weights[0].items()):
            failures.append("ranks end with different weights")
    return failures[:3]


def _reasons(program: Program, everyone: list[Outcome], performed: Acts) -> list[str]:
    failures = []
    for (_, step, position, _), error in [item for one in everyone for item in one.refused.items()]:
        act = program.steps[step].acts[position]
        if not error[1]:
            failures.append(f"unclear error: step {step} {act}: {error[0][:300]}")
        elif not may_refuse(program, step, act):
            failures.append(f"refused without cause: step {step} {act}: {error[0][:300]}")
    error, last = everyone[0].error, everyone[0].step
    if error is not None:
        causes = [
            act
            for number, act in performed
            if may_refuse(program, number, act) and (number == last or act.kind not in OF_GRADIENTS)
        ]
        if not all(one.error is None or one.error[1] for one in everyone):
            failures.append(f"unclear error: step {last}: {error[0][:400]}")
        elif not causes:
            failures.append(f"error without cause: step {last}: {error[0][:400]}")
    refused = {(key[1], program.steps[key[1]].acts[key[2]]) for one in everyone for key in one.refused}
    silent = [
        (number, act)
        for number, act in performed
        if (number, act) not in refused
        if (number < last and must_refuse(program, number, act))
        or (error is None and drifts(program, act) and not freezes(program))
    ]
    failures += [f"silent: step {number} {act} (steps: {last})" for number, act in silent]
    return failures[:4]


# ---------------------------------------------------------------------------------- the rules


def steady(program: Program) -> bool:
    """Whether each parameter accumulates equally often in each step, so that nothing leaves before the last of its gradients."""
    counts = {len(own) for step in program.steps for own in step.passes}
    plain = all(one.kind == "plain" for one in program.passes)
    events = any(step.events for step in program.steps)
    return len(counts) == 1 and plain and not events and not any(act.kind in FLAGS for act in program.acts)


def may_be_in_flight(program: Program, number: int, act: Act) -> bool:
    if program.stage > 1:
        return act.place in ("pass", "backward")
    if program.ranks == 1 or number == 0:
        return False
    last = act.part == len(program.steps[number].passes[0]) - 1
    return act.place == "backward" or (act.place == "pass" and (last or not steady(program)))


def may_refuse(program: Program, number: int, act: Act) -> bool:
    """Whether an error is an answer to an act: a race with stock Horovod, or half of what is in shards."""
    kind, place, step, stage = act.kind, act.place, program.steps[number], program.stage
    zeroed = step.clear in ("zero", "model_zero", "never") or any(
        one.kind == "optimizer_zeros" for one in step.acts
    )
    shards = stage > 1 and (place in ("synchronized", "step") or (place == "cleared" and zeroed))
    flying = may_be_in_flight(program, number, act)
    if drifts(program, act):
        return True
    if kind in READS:
        return (kind == "dot" and stage == 3) or (kind != "is_none" and (flying or shards))
    if kind == "optimizer_zeros":
        return place in ("pass", "backward")  # as in Horovod
    if kind in IN_PLACE:
        return flying or shards or (place == "backward" and program.ranks > 1)
    if kind in REPLACED:
        if shards and kind in ("doubled", "cloned", "swapped", "data_set", "collect"):
            return True  # they read
        if kind in ("dropped", "model_none") and place == "backward" and len(act.ranks) == program.ranks:
            return False
        return flying or (stage > 1 and place == "synchronized")
    if kind in ACTS["weights"]:
        return stage == 3 and not act.within and kind != "evaluate"
    if kind in ACTS["state"]:
        return stage > 0 and kind != "state_load" and act.through != "pieces"
    if kind in HOOKS:
        if kind == "pre_mul" or (program.ranks == 1 and stage < 2):
            return False
        # One that comes before the optimizer's is refused where it would find the last part of a gradient alone.
        several = stage > 1 and any(len(own) > 1 for one in program.steps for own in one.passes)
        return place == "wrapped" or several or not steady(program)
    return kind in FLAGS and len(act.ranks) < program.ranks


def must_refuse(program: Program, number: int, act: Act) -> bool:
    """Whether a gradient was changed in place between ``backward()`` and ``synchronize()``, as by torch's clipping."""
    step = program.steps[number]
    if program.ranks == 1 or act.place != "backward" or act.kind not in IN_PLACE or not any(step.passes):
        return False
    if act.kind in ("data_mul_", "model_zeros", "optimizer_zeros", "index"):
        return (
            False  # no version tells of the first; the others drop gradients, or may find nothing to write to
        )
    changes = [one for one in step.acts if one.place == "backward" and one.kind in (*REPLACED, *IN_PLACE)]
    if len(changes) > 1 or act.targets or any(one.kind in HOOKS for one in program.acts):
        return False  # the gradient may have been replaced, or be none
    events = [event[0] for step in program.steps for event in step.events]
    return "freeze" not in events and not any(one.kind in FLAGS for one in program.acts)


def drifts(program: Program, act: Act) -> bool:
    """Whether an act of some ranks gives them other weights than others have."""
    writes = act.kind in (*WEIGHTS, *GROUPS) and act.kind not in ("average", "away", "back")
    return len(act.ranks) < program.ranks and writes


def freezes(program: Program) -> bool:
    """Whether parameters are frozen. Ranks may differ in these, also where a gradient that was not cleared moves them still."""
    return any(act.kind == "freeze" for act in program.acts)


# ---------------------------------------------------------------------------------- one process


def _against_one_process(program: Program, everyone: list[Outcome]) -> list[str]:
    left_out = {key for one in everyone for key in one.refused}
    for _, step, position, at in list(left_out):
        act = program.steps[step].acts[position]
        if common(act):
            left_out.add((act.ranks[0], step, position, at))

    def run(noise: int = 0) -> Run:
        return complete(InOneProcess(program, noise, left_out))

    alone = run()
    return _differ(program, everyone, alone) and _differ(program, everyone, alone, list(map(run, NOISES)))


def _differ(program: Program, everyone: list[Outcome], alone: Run, noisy: Sequence[Run] = ()) -> list[str]:
    """What is not as in one process, by the least tolerance, or by what roundings did in noisy runs."""
    result, floor = alone.result(), floor_of(program)
    least = tolerance_of(result, floor=floor)
    failures = []
    ended = [one.step if one.error else len(program.steps) for one in everyone]
    reads = {
        key: value for one, end in zip(everyone, ended) for key, value in one.reads.items() if key[1] < end
    }
    for key, value in reads.items():
        rank, step, position, at = key
        wanted = alone.hand.reads.get(key)
        if wanted is None:
            failures.append(f"one process has not read {key}")
            continue
        bounds = [MARGIN * distance(wanted, other.hand.reads[key]) for other in noisy]
        bound = max([least * max(1.0, abs(wanted.item())), *bounds])
        if not distance(value, wanted) <= bound and str(value.item()) != str(wanted.item()):
            act = "hook" if position < 0 else program.steps[step].acts[position]
            failures.append(
                f"reads something else: step {step} {act} parameter {at} on rank {rank}: "
                f"{value.item():.6g}, one process {wanted.item():.6g}"
            )
    if everyone[0].error is None:
        tolerance = tolerance_of(result, [other.result() for other in noisy], floor)
        everything = {name: value for one in everyone for name, value in one.values.items()}
        failures += differences("one process", everything, result, tolerance)
    return failures[:3]
