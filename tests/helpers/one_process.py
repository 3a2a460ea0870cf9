"""The reference: one process that computes each rank's batch in turn and averages the gradients.

Every rank runs it by itself, without communication, and compares its own parameters with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc

WIDTH = 8
SMALL = 0.0002  # MiB: a bucket per parameter of a chain


def batch(step: int, rank: int, part: int = 0, width: int = WIDTH) -> torch.Tensor:
    """Input of (step, rank, micro-batch): the same wherever it is computed."""
    generator = torch.Generator().manual_seed(1_000_000 * part + 1000 * step + rank + 1)
    return torch.randn(4, width, generator=generator)


def chain(layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers that can be used one by one, with the same weights on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]).to(
        dtype
    )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrap(model: nn.Module, bare: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """A distributed optimizer, of SGD by default, with small buckets."""
    return hc.DistributedOptimizer(
        sgd(model) if bare is None else bare,
        named_parameters=model.named_parameters(),
        **{"bucket_cap_mb": SMALL, **options},
    )


def loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """The loss of a rank's batch, of this rank's by default."""
    x = batch(step, hc.rank() if rank is None else rank).to(next(model.parameters()).dtype)
    return (model(x) - 0.3).square().mean()


def loss_of_all(model: nn.Module, step: int, op: Any = hc.Average) -> torch.Tensor:
    """What one process computes for all ranks."""
    losses = torch.stack([loss(model, step, rank) for rank in range(hc.size())])
    return losses.sum() if op == hc.Sum else losses.mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def train_for_all(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The reference of :func:`train`."""
    for step in steps:
        optimizer.zero_grad()
        loss_of_all(model, step).backward()
        optimizer.step()


def same_everywhere(model: nn.Module) -> None:
    everywhere = hc.allgather_object(fingerprint(model))
    assert all(weights == everywhere[0] for weights in everywhere)


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

    build: Callable[[], nn.Module]
    backward: Callable[[nn.Module, int, int], Any]
    between: Callable[[nn.Module, torch.optim.Optimizer, int], Any] = lambda model, optimizer, step: None
    static: bool = True
    tolerance: float = 2e-6
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    options: dict[str, Any] = field(default_factory=dict)
    clear: str = "none"  # how gradients are cleared: none | zero | model | never
    scale: float = 1.0  # of the averaged gradient
    steps: int = 5
    _reference: nn.Module | None = field(default=None, init=False, repr=False)

    def reference(self) -> nn.Module:
        """Trained by one process with the batches of all ranks: once, however often it is compared with."""
        if self._reference is None:
            self._reference = train_one_process(self, hc.size())
        return self._reference


def clear_gradients(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "none":
        optimizer.zero_grad(set_to_none=True)
    elif how == "zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        model.zero_grad()


def seeded_build(scenario: Scenario) -> nn.Module:
    torch.manual_seed(7)
    return scenario.build()


def train_one_process(scenario: Scenario, ranks: int) -> nn.Module:
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


def train_distributed(scenario: Scenario, **options: Any) -> tuple[nn.Module, Any]:
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


def difference(model: nn.Module, other: nn.Module) -> float:
    largest = 0.0
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.isfinite(ours).all()
        largest = max(largest, (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0)
    return largest


def fingerprint(model: nn.Module) -> list[bytes]:
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
