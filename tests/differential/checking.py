"""What must be equal: a program's outcome on the ranks of a job, in one process, and run in other ways."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from interpreter import Run
from programs import Program
from torch import Tensor

import hvd_ckpt as hc

__all__ = ["check"]

# Largest difference from one process, by the narrowest format in the model; weights are about 0.3, a step moves them by 0.005.
TOLERANCE = {"float64": 3e-5, "float32": 3e-5, "float16": 0.01, "bfloat16": 0.05}
LOSSY = 0.05


def check(program: Program) -> list[str]:
    """Runs a program in every way that must end in the same; returns what does not, the same on every rank. Collective."""
    failures: list[str] = []
    run = Run(program)
    for number in range(len(program.steps)):
        run.step(number)
    result = run.result()

    weights = {name: value for name, value in result.items() if not name[0].isdigit()}
    if len(set(hc.allgather_object(digest(weights)))) > 1:
        failures.append("ranks differ")

    again = Run(program)
    for number in range(len(program.steps)):
        if number and number == program.resume:
            again = again.resumed()
        again.step(number)
    how = f"resumed after {program.resume} steps" if program.resume else "run again"
    failures += differences(how, (result, run.seen), (again.result(), again.seen), 0.0)

    half = max((TOLERANCE[dtype] for dtype in program.dtypes), default=TOLERANCE["float32"])
    masters = program.stage > 0 and program.dtypes & {"float16", "bfloat16"}  # of float32; not in one process
    tolerance = LOSSY if program.lossy or masters else half
    if program.stops_in_another_place:
        return together(failures)
    if any(segment.recompute != "keep" for segment in program.segments):
        kept = Run(program, recompute=False)
        for number in range(len(program.steps)):
            kept.step(number)
        bound = tolerance if program.sums_in_another_order else 0.0
        failures += differences(
            "without recomputation", (result, run.seen), (kept.result(), kept.seen), bound
        )

    exact = program.ranks <= 2 and not (run.late or program.lossy or program.sums_in_another_order)
    exact = exact and "gradient_predivide_factor" not in program.options
    if program.stage > 1 and any(step.how == "clip" for step in program.steps):
        exact = False  # the norm is summed in another order
    if program.shared or program.embedding == "sparse":
        exact = False  # gradients are reduced twice; the entries of sparse ones are added up in another order
    exact = exact and not masters
    alone = Run(program, alone=True)
    if hc.rank() == 0:
        for number in range(len(program.steps)):
            alone.step(number)
    buffers = hc.allgather_object({name: value for name, value in result.items() if name[0].isdigit()})
    if hc.rank() == 0:
        everything = {**weights, **{name: value for own in buffers for name, value in own.items()}}
        failures += differences(
            "one process", (everything, []), (alone.result(), []), 0.0 if exact else tolerance
        )
    return together(failures)


def together(failures: list[str]) -> list[str]:
    return [f"rank {rank}: {one}" for rank, own in enumerate(hc.allgather_object(failures)) for one in own]


def digest(values: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in values.items():
        found.update(name.encode())
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def differences(what: str, ours: tuple[Any, Any], theirs: tuple[Any, Any], tolerance: float) -> list[str]:
    """One sentence for the value that differs most, if it does by more than the tolerance (0: by a bit)."""
    largest, where = 0.0, ""
    for name, value in ours[0].items():
        other = theirs[0][name]
        if value.shape != other.shape or value.dtype is not other.dtype:
            return [f"{what}: {name} is of another shape or dtype"]
        same = torch.equal(value, other) or not value.numel()
        distance = 0.0 if same else (value.double() - other.double()).abs().max().item()
        distance = distance if distance == distance else float("inf")
        if not same and distance >= largest:
            largest, where = distance, name
    if where and largest > tolerance:
        return [f"{what}: {where} differs by {largest:.3g} (at most {tolerance:g})"]
    if tolerance == 0.0 and str(ours[1]) != str(theirs[1]):
        return [f"{what}: losses differ: {ours[1]} and {theirs[1]}"]
    return []
