"""The reference: one process that computes each rank's batch in turn and averages the gradients.

Every rank runs it by itself, without communication, and compares its own parameters with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import hvd_ckpt as hc

WIDTH = 8


def batch(step: int, rank: int, part: int = 0, width: int = WIDTH) -> torch.Tensor:
    """Input of (step, rank, micro-batch): the same wherever it is computed."""
    generator = torch.Generator().manual_seed(1_000_000 * part + 1000 * step + rank + 1)
    return torch.randn(4, width, generator=generator)


@dataclass
class Scenario:
    """A model, and what happens in one step of one rank.

    Attributes:
        build: makes the model; seeded, so every rank gets the same one.
        backward: forward and backward passes of (model, step, rank); no optimizer.
        between: called before each step with (model, optimizer, step) by the distributed run, and by the reference.
        static: the graph is the same in every step, so no gradient may be late after step 1.
        tolerance: largest difference allowed, absolute.
    """

    build: Callable[[], torch.nn.Module]
    backward: Callable[[torch.nn.Module, int, int], Any]
    between: Callable[[torch.nn.Module, torch.optim.Optimizer, int], Any] = lambda model, optimizer, step: (
        None
    )
    static: bool = True
    tolerance: float = 2e-6
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )
    options: dict[str, Any] = field(default_factory=dict)
    clear: str = "none"  # how gradients are cleared: none | zero | model | never
    scale: float = 1.0  # of the averaged gradient
    steps: int = 5
    _reference: torch.nn.Module | None = field(default=None, init=False, repr=False)

    def reference(self) -> torch.nn.Module:
        """Trained by one process with the batches of all ranks: once, however often it is compared with."""
        if self._reference is None:
            self._reference = train_one_process(self, hc.size())
        return self._reference


def clear_gradients(how: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "none":
        optimizer.zero_grad(set_to_none=True)
    elif how == "zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        model.zero_grad()


def seeded_build(scenario: Scenario) -> torch.nn.Module:
    torch.manual_seed(7)
    return scenario.build()


def train_one_process(scenario: Scenario, ranks: int) -> torch.nn.Module:
    model = seeded_build(scenario)
    optimizer = scenario.optimizer(list(model.parameters()))
    for step in range(scenario.steps):
        scenario.between(model, optimizer, step)
        clear_gradients(scenario.clear, model, optimizer)
        start = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        sums: list[torch.Tensor | None] = [None] * len(start)
        for rank in range(ranks):
            for parameter, gradient in zip(model.parameters(), start):
                parameter.grad = None if gradient is None else gradient.clone()
            torch.manual_seed(10_000 * step + rank)
            scenario.backward(model, step, rank)
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    gradient = parameter.grad.clone()
                    total = sums[index]
                    sums[index] = gradient if total is None else total + gradient
        for parameter, total in zip(model.parameters(), sums):
            parameter.grad = None if total is None else total / ranks * scenario.scale
        optimizer.step()
    return model


def train_distributed(scenario: Scenario, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = seeded_build(scenario)
    optimizer = hc.DistributedOptimizer(
        scenario.optimizer(list(model.parameters())),
        named_parameters=model.named_parameters(),
        **{**scenario.options, **options},
    )
    late_after_first = 0
    orders = []
    for step in range(scenario.steps):
        scenario.between(model, optimizer, step)
        clear_gradients(scenario.clear, model, optimizer)
        torch.manual_seed(10_000 * step + hc.rank())
        scenario.backward(model, step, hc.rank())
        optimizer.step()
        if step > 0:
            late_after_first += len(optimizer.reduction_stats.last.late_gradients)
        counts = optimizer.reduction_stats.last.launches.values()
        assert all(count == 1 for count in counts), f"a bucket left {max(counts)} times in step {step}"
        orders.append(optimizer.reduction_stats.last.launch_order)
    everywhere = hc.allgather_object((orders, fingerprint(model)))
    for order, weights in everywhere:
        assert order == [sorted(launches) for launches in orders], (
            "ranks launched buckets in different orders"
        )
        assert weights == everywhere[0][1], "ranks differ"
    if scenario.static and hc.size() > 1:
        assert late_after_first == 0, f"{late_after_first} late gradients after step 1"
    return model, optimizer


def difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    largest = 0.0
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.isfinite(ours).all()
        largest = max(largest, (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0)
    return largest


def fingerprint(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def check(scenario: Scenario, **options: Any) -> Any:
    """Trains both ways: ranks must agree bit for bit, and with the reference within the tolerance."""
    model, optimizer = train_distributed(scenario, **options)
    reference = scenario.reference()
    distance = difference(model, reference)
    assert distance <= scenario.tolerance, f"differs from one process by {distance}"
    moved = difference(reference, seeded_build(scenario))
    assert moved > 100 * scenario.tolerance, "the reference did not train"
    return optimizer
