"""The right answer: what training gives in one process, without an engine and without recomputation.

One process computes each rank's batch in turn, with that rank's random state and that rank's own buffers (batch-norm
statistics), averages the gradients and takes the step. Parameters of every rank must come out as the reference's,
and each rank's buffers as the reference has them for that rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.app.compare import scenarios  # noqa: F401  # whose classes enter the catalogue
from hvd_ckpt.app.compare.cells import KEEP, TrainingSettings
from hvd_ckpt.app.compare.runner.engines import OneProcess
from hvd_ckpt.app.compare.training import Training, build_seed, step_seed
from hvd_ckpt.app.compare.workloads import Workload, make_workload
from hvd_ckpt.processes.devices import use_deterministic_kernels

Tensors = dict[str, torch.Tensor]


@dataclass
class Reference:
    """The state of training in one process.

    Attributes:
        start: parameters and buffers before the first step.
        parameters: parameters after the last step.
        buffers: for each rank, buffers after the last step.
        losses: for each rank, its loss before each step.
    """

    start: Tensors
    parameters: Tensors
    buffers: list[Tensors]
    losses: list[list[float]]

    def save(self, folder: Path, workload: str) -> None:
        """Writes it for the ranks."""
        torch.save(vars(self), folder / f"reference-{workload}.pt")

    @classmethod
    def load(cls, folder: Path, workload: str) -> Reference:
        """The reference that :meth:`save` wrote."""
        return cls(**torch.load(folder / f"reference-{workload}.pt", weights_only=True))


def compute_reference(name: str, size: int, settings: TrainingSettings, folder: Path) -> dict[str, Any]:
    """Writes the reference of a workload into a folder; returns what a report says of it, and its number of blocks."""
    use_deterministic_kernels()
    workload = make_workload(name, settings)
    model: Any = workload.model(KEEP)
    reference = make_reference(workload, size, settings)
    reference.save(folder, name)
    losses = [statistics.fmean(step) for step in zip(*reference.losses)]  # while all ranks have batches
    facts = {"title": workload.title, "line": workload.model_line, "small": workload.small}
    return {**facts, "losses": losses, "layers": len(model)}


def make_reference(workload: Workload, size: int, settings: TrainingSettings) -> Reference:
    """Trains ``workload`` as ``size`` ranks should, in this process.

    Gradients are averaged in float64 and rounded once. A rank that has no batches left adds nothing, and the sum is still
    divided by the number of all ranks.
    """
    seed, steps = settings.seed, settings.steps
    training = Training(workload, OneProcess(), settings, build_seed(seed, 0))
    bare = training.bare
    parameters = list(bare.parameters())
    start = _copy({**dict(bare.named_parameters()), **dict(bare.named_buffers())})
    buffers = [_copy(dict(bare.named_buffers())) for _ in range(size)]
    random_states = [torch.Generator().manual_seed(step_seed(seed, rank)).get_state() for rank in range(size)]
    losses: list[list[float]] = [[] for _ in range(size)]

    for number in range(steps):
        workload.before_step(bare, number)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for rank in range(size):
            if number >= workload.steps_of(rank, size, steps):
                continue
            # The ranks take turns in this process, each with the state that its own process would have.
            _load_buffers(bare, buffers[rank])
            torch.set_rng_state(random_states[rank])
            training.begin(rank, size, number)
            each = training.gradients()
            losses[rank].append(sum(loss.item() for loss in each) / len(each))
            random_states[rank] = torch.get_rng_state()
            buffers[rank] = _copy(dict(bare.named_buffers()))
            for index, parameter in enumerate(parameters):
                # A gradient that no rank has stays None, so that weight decay and momentum skip its parameter.
                if parameter.grad is not None:
                    gradient, before = parameter.grad.double(), sums[index]
                    sums[index] = gradient if before is None else before + gradient
        for parameter, total in zip(parameters, sums, strict=True):
            # Scaled gradients are averaged before they are unscaled. An overflow on any rank is still
            # infinite in the mean, so that the scaler skips the step for all ranks, as they must.
            parameter.grad = None if total is None else (total / size).to(parameter.dtype)
        training.update()

    return Reference(start, _copy(dict(bare.named_parameters())), buffers, losses)


def apart(reference: Reference, trained: Training, rank: int) -> dict[str, Any]:
    """How far a rank's trained parameters and buffers are from the reference: the results of :func:`largest_difference`."""
    figures: dict[str, Any] = {}
    for prefix, found, expected in (
        ("", dict(trained.bare.named_parameters()), reference.parameters),
        ("buffer_", dict(trained.bare.named_buffers()), reference.buffers[rank]),
    ):
        on_cpu = {name: tensor.detach().cpu() for name, tensor in found.items()}
        values = largest_difference(on_cpu, expected, reference.start)
        figures |= {prefix + name: value for name, value in zip(("difference", "relative", "worst"), values)}
    return figures


def largest_difference(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> tuple[float, float, str]:
    """How far tensors are from the expected ones after training from ``start``.

    Returns the largest absolute difference; the largest difference relative to what training changed; and the name
    of the tensor where that is. Relative means: to the largest change in that tensor plus a hundredth of
    the largest change in any, so that a tensor which should not change at all does not measure rounding by rounding.
    A missing tensor or a value that is not a number is infinitely far. So is everything if an expected value is not finite, since
    such a reference proves nothing.
    """
    if not expected:
        return 0.0, 0.0, ""
    for name, tensor in expected.items():
        if not tensor.isfinite().all():
            return inf, inf, name
    changes = {
        name: float((tensor.double() - start[name].double()).abs().max()) for name, tensor in expected.items()
    }
    floor = max(changes.values()) / 100
    absolute, relative, worst = 0.0, 0.0, ""
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape:
            return inf, inf, name
        gap = float(
            (found[name].detach().double() - tensor.double()).abs().nan_to_num(nan=inf, posinf=inf).max()
        )
        absolute = max(absolute, gap)
        share = 0.0 if gap == 0 else gap / (changes[name] + floor) if changes[name] + floor else inf
        if share > relative:
            relative, worst = share, name
    return absolute, relative, worst


def _copy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _load_buffers(model: torch.nn.Module, buffers: Tensors) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
