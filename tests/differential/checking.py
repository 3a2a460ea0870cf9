"""Checks of a program: its outcome on the ranks of a job equals those in one process and of other ways to run it."""

from __future__ import annotations

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
Values = Mapping[str, Tensor]
"""Weights by name, and what belongs to a rank: names that begin with its number."""


def check(program: Program) -> list[str]:
    """Runs a program in every way that must end in the same; returns what does not, the same on every rank. Collective."""
    run = complete(Run(program))
    result = run.result()
    steps = program.join or (len(program.steps),) * program.ranks
    everyone = gather(result)
    last = steps.index(max(steps))
    prints = {fingerprint(weights_of(own).items()) for own, n in zip(everyone, steps) if n == steps[last]}
    failures = ["ranks differ"] if len(prints) > 1 else []
    failures += [f"refused: {key}: {error}" for key, error in run.hand.refused.items()]
    parts = current().gather_objects(fingerprint(result.items()))
    failures += ["parts differ"] if len(set(parts)) > 1 else []

    def compare(how: str, other: Run, tolerance: float = 0.0) -> None:
        failures.extend(differences(how, result, other.result(), tolerance, (run.seen, other.seen)))

    again = complete(Run(program), program.resume)
    if program.resume:
        # Weights that a forward pass writes then travel to the ranks in another format once more.
        written = any(block.kind == "max_norm" for block in program.blocks)
        rounded = LOSSY if written and program.stage > 0 and "wire" in program.options else 0.0
        compare(f"resumed after {program.resume} steps", complete(again.resumed()), rounded)
    else:
        compare("run again", again)
    if program.reorders and any(one.trap is not None and one.trap[0] == "backward" for one in program.passes):
        return together(
            failures
        )  # an error may come when a parameter has a part of its gradient, or when it has none

    recomputed = any(segment.recompute != "keep" for segment in program.segments)
    # Units of stage 3, which share scales of int8 and partial sums of the norm that clips, follow what is recomputed.
    units = program.stage == 3 and (program.clips or "int8" in str(program.options.get("wire")))
    rounds = recomputed and (program.reorders or units)
    tolerance = 0.0
    if hc.rank() == 0:
        everything = {name: value for own in (*everyone, everyone[last]) for name, value in own.items()}
        alone, floor = complete(InOneProcess(program)).result(), floor_of(program)
        if not exact(program, run):
            tolerance = tolerance_of(alone, floor=floor)
            if rounds or differences("one process", everything, alone, tolerance):
                # An adaptive optimizer multiplies a difference in the last place of a gradient by lr / (sqrt(v) + eps), 5 at most
                # here and 100 times that of SGD, and the next gradients are those of other weights.
                others = (complete(InOneProcess(program, noise)).result() for noise in NOISES)
                tolerance = tolerance_of(alone, others, floor)
        failures += differences("one process", everything, alone, tolerance)
    tolerance = hc.broadcast_object(tolerance, 0, name="tolerance")
    if recomputed:
        compare(
            "without recomputation", complete(Run(program, recompute=False)), tolerance if rounds else 0.0
        )
    return together(failures)


def resumes(program: Program) -> list[str]:
    """Resumes a program after each of its steps: the same bits, reduced in the same way. Collective."""
    whole, part, failures = complete(Run(program)), Run(program), []
    for stop in range(1, len(program.steps)):
        again = complete(complete(part, stop).resumed())
        how = f"resumed after {stop} steps"
        failures += differences(how, whole.result(), again.result(), losses=(whole.seen, again.seen))
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
    kinds = {one.kind for one in program.passes}
    return not (
        program.ranks > 2
        or program.tensor > 1  # sums within layers
        or run.late
        or program.lossy
        or program.reorders
        or "gradient_predivide_factor" in program.options
        or (program.stage > 1 and program.clips)  # the norm is summed in another order
        or program.embedding == "sparse"  # entries are added up in another order
        # A unit adds up its parts of the gradient of an input first, as FSDP2 does; tanh has another part.
        or (program.stage == 3 and "penalty" in kinds)
    )


def floor_of(program: Program) -> float:
    """The least tolerance for weights of about 1."""
    return LOSSY if program.lossy else FLOOR


def weights_of(values: Values) -> dict[str, Tensor]:
    """Without what belongs to a rank."""
    return {name: value for name, value in values.items() if not name[0].isdigit()}


def tolerance_of(alone: Values, noisy: Iterable[Values] = (), floor: float = FLOOR) -> float:
    """What roundings of gradients may do, found by experiment.

    A difference in the last place of a gradient grows from step to step. How much, depends on what is run. So one process runs it
    again, twice, with each gradient changed by up to one unit in the last place of its largest element, and compares.
    """
    # Weights of about 0.3 grow where gradients are never cleared.
    weights = [value.double().abs().max().item() for value in weights_of(alone).values() if value.numel()]
    tolerances = [floor * max(1.0, *weights)]
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


def differences(
    what: str, ours: Values, theirs: Values, tolerance: float = 0.0, losses: tuple[Any, Any] = ((), ())
) -> list[str]:
    """One sentence for the value that differs most, if it does by more than the tolerance (0: by a bit, or in the losses)."""
    largest, where = 0.0, ""
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape or value.dtype is not other.dtype:
            return [f"{what}: {name} is of another shape or dtype"]
        found = distance(value, other)
        if found >= largest and not torch.equal(value, other):
            largest, where = found, name
    if where and largest > tolerance:
        return [f"{what}: {where} differs by {largest:.3g} (at most {tolerance:.3g})"]
    if tolerance == 0.0 and str(losses[0]) != str(losses[1]):
        return [f"{what}: losses differ: {losses[0]} and {losses[1]}"]
    return []
