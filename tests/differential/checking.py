"""Checks of a program: its outcome on the ranks of a job equals those in one process and of other ways to run it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from interpreter import Run
from programs import Program
from reference import InOneProcess
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.processes.grid import current

MARGIN = 16.0  # over what rounding the gradients of one process does; programs differ in their roundings, and in where they fall
FLOOR = 1e-6  # a few units in the last place of the largest weight, or of 1
LOSSY = 0.05  # where gradients or weights are sent, or updated, in another format; weights are about 0.3

NOISES = (1, 2)


def check(program: Program) -> list[str]:
    """Runs a program in every way that must end in the same; returns what does not, the same on every rank. Collective."""
    run = complete(Run(program))
    result = run.result()
    buffers = {name: value for name, value in result.items() if name[0].isdigit()}
    weights = {name: value for name, value in result.items() if name not in buffers}
    steps = program.join or (len(program.steps),) * program.ranks
    everyone = gather((weights, buffers))
    last = steps.index(max(steps))
    prints = {fingerprint(own.items()) for (own, _), taken in zip(everyone, steps) if taken == steps[last]}
    failures = ["ranks differ"] if len(prints) > 1 else []
    failures += [f"refused: {key}: {error}" for key, error in run.hand.refused.items()]
    parts = current().gather_objects(fingerprint(result.items()))
    failures += ["parts differ"] if len(set(parts)) > 1 else []

    again = complete(Run(program), program.resume)
    if program.resume:
        again = complete(again.resumed())
    how = f"resumed after {program.resume} steps" if program.resume else "run again"
    rounded = LOSSY if program.resume and program.rounds_what_is_written else 0.0
    failures += differences(how, (result, run.seen), (again.result(), again.seen), rounded)
    if program.stops_in_another_place:
        return together(failures)

    everything = dict(everyone[last][0])
    for _, own in everyone:
        everything.update(own)
    recomputed = any(segment.recompute != "keep" for segment in program.segments)
    rounds = recomputed and (program.sums_in_another_order or program.rounds_in_other_blocks)
    tolerance = 0.0
    if hc.rank() == 0:
        alone = complete(InOneProcess(program)).result()
        compare = functools.partial(differences, "one process", (everything, []), (alone, []))
        if not exact(program, run):
            tolerance = tolerance_of(alone, floor=floor_of(program))
            if rounds or compare(tolerance):
                # An adaptive optimizer multiplies a difference in the last place of a gradient by lr / (sqrt(v) + eps), 5 at most
                # here and 100 times that of SGD, and the next gradients are those of other weights.
                others = (complete(InOneProcess(program, noise)).result() for noise in NOISES)
                tolerance = tolerance_of(alone, others, floor_of(program))
        failures += compare(tolerance)
    tolerance = hc.broadcast_object(tolerance, 0, name="tolerance")
    if recomputed:
        kept = complete(Run(program, recompute=False))
        bound = tolerance if rounds else 0.0
        failures += differences(
            "without recomputation", (result, run.seen), (kept.result(), kept.seen), bound
        )
    return together(failures)


def resumes(program: Program) -> list[str]:
    """Resumes a program after each of its steps: the same bits, reduced in the same way. Collective."""
    whole, part, failures = complete(Run(program)), Run(program), []
    for stop in range(1, len(program.steps)):
        again = complete(complete(part, stop).resumed())
        how = f"resumed after {stop} steps"
        failures += differences(how, (whole.result(), whole.seen), (again.result(), again.seen), 0.0)
        if again.reductions != whole.reductions[stop:]:
            failures.append(f"{how}: other reductions, {again.reductions} and {whole.reductions[stop:]}")
    return together(failures)


def complete(run: Run, stop: int = 0) -> Run:
    """Runs the steps that are left, or those before ``stop``."""
    for number in range(len(run.seen), stop or len(run.program.steps)):
        if run.alone or run.ranks[0] in run.program.present(number):
            run.step()
    if run.program.join and not run.alone:
        hc.join()
    return run


def exact(program: Program, run: Run) -> bool:
    """Whether ranks and one process round alike."""
    return not (
        program.ranks > 2
        or program.tensor > 1  # sums within layers
        or run.late
        or program.lossy
        or program.master_weights
        or program.sums_in_another_order
        or "gradient_predivide_factor" in program.options
        or (
            program.stage > 1 and any(step.how == "clip" for step in program.steps)
        )  # the norm is summed in another order
        or program.embedding == "sparse"  # entries are added up in another order
        # A unit adds up its parts of the gradient of an input first, as FSDP2 does; tanh has another part.
        or (program.stage == 3 and any(one.kind == "penalty" for one in program.passes))
    )


def floor_of(program: Program) -> float:
    """The least tolerance for weights of about 1."""
    return LOSSY if program.lossy or program.master_weights else FLOOR


def tolerance_of(
    alone: Mapping[str, Tensor], noisy: Iterable[Mapping[str, Tensor]] = (), floor: float = FLOOR
) -> float:
    """What roundings of gradients may do, found by experiment.

    A difference in the last place of a gradient grows from step to step. How much, depends on what is run. So one process runs it
    again, twice, with each gradient changed by up to one unit in the last place of its largest element, and compares.
    """
    # Weights of about 0.3 grow where gradients are never cleared.
    weights = [value for name, value in alone.items() if not name[0].isdigit() and value.numel()]
    tolerances = [floor * max(1.0, *(value.double().abs().max().item() for value in weights))]
    tolerances += [MARGIN * distance(value, other[name]) for other in noisy for name, value in alone.items()]
    return max(tolerances)


def together(failures: list[str]) -> list[str]:
    own = [f"rank {rank}: {one}" for rank, found in enumerate(gather(failures)) for one in found]
    return list(dict.fromkeys(one for found in current().gather_objects(own) for one in found))


def gather(value: Any) -> list[Any]:
    return hc.allgather_object(value, name="differential")  # unnamed, ranks that have joined count apart


def distance(value: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; infinite where one of them is not a number."""
    if torch.equal(value, other) or not value.numel():
        return 0.0
    found = (value.double() - other.double()).abs().max().item()
    return found if found == found else float("inf")


def differences(what: str, ours: tuple[Any, Any], theirs: tuple[Any, Any], tolerance: float) -> list[str]:
    """One sentence for the value that differs most, if it does by more than the tolerance (0: by a bit)."""
    largest, where = 0.0, ""
    for name, value in ours[0].items():
        other = theirs[0][name]
        if value.shape != other.shape or value.dtype is not other.dtype:
            return [f"{what}: {name} is of another shape or dtype"]
        found = distance(value, other)
        if found >= largest and not torch.equal(value, other):
            largest, where = found, name
    if where and largest > tolerance:
        return [f"{what}: {where} differs by {largest:.3g} (at most {tolerance:.3g})"]
    if tolerance == 0.0 and str(ours[1]) != str(theirs[1]):
        return [f"{what}: losses differ: {ours[1]} and {theirs[1]}"]
    return []
