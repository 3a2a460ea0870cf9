"""The reference: one process that computes each rank's batch in turn and averages the gradients.

Every rank runs it by itself, without communication, and compares its own parameters with the result. Workloads are those of
``hvd-ckpt compare``, or a test's own; so are reference and training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.reference import largest_difference, make_reference
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.training import train as train_cell
from hvd_ckpt.app.compare.workloads import Workload

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
    return distribute(
        sgd(model) if bare is None else bare,
        named_parameters=model.named_parameters(),
        model=model,
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


def fingerprint(model: nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def raises_everywhere(kind: type[Exception], match: str, work: Callable[[], Any]) -> str:
    """The error must come on every rank, so nobody is left waiting, and say the same; returns its text."""
    with pytest.raises(kind, match=match) as caught:
        work()
    texts = hc.allgather_object(str(caught.value))
    assert len({text.partition(": ")[2] if text.startswith("rank ") else text for text in texts}) == 1, texts
    return texts[0]


def same_everywhere(model: nn.Module) -> None:
    everywhere = hc.allgather_object(fingerprint(model))
    assert all(weights == everywhere[0] for weights in everywhere)


def difference(model: nn.Module, other: nn.Module) -> float:
    largest = 0.0
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.isfinite(ours).all()
        largest = max(largest, (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0)
    return largest


class Watched(HvdCkpt):
    """The engine of ``hvd-ckpt compare`` with options of :class:`hvd_ckpt.DistributedOptimizer`, which keeps what it made.

    Attributes:
        model, optimizer: those of the training run.
        steps: the reducer's statistics of each step.
    """

    model: nn.Module
    optimizer: Any

    def __init__(
        self, clear: Callable[[nn.Module, Any], Callable[[], Any]] | None = None, **options: Any
    ) -> None:
        self.options = options  # type: ignore[misc]
        self._clear = clear
        self.steps: list[Any] = []
        self.start(Path())

    def wrap(self, model: nn.Module, optimizer: Any, passes: int = 1) -> tuple[nn.Module, Any]:
        self.options = {"model": model, **self.options}  # type: ignore[misc]
        self.model, self.optimizer = super().wrap(model, optimizer, passes)
        if self._clear is not None:
            self.optimizer.zero_grad = self._clear(self.model, self.optimizer)
        return self.model, self.optimizer


def check(
    workload: Workload,
    variant: str = "non-reentrant",
    *,
    steps: int = 5,
    tolerance: float = 2e-6,
    expected: Workload | None = None,
    **options: Any,
) -> Watched:
    """Trains on all ranks and in one process: ranks must agree bit for bit, and with the reference within the tolerance.

    Args:
        tolerance: largest difference allowed, absolute.
        expected: what one process trains, if not the same.
        options: of the distributed optimizer, and ``clear``.
    """
    settings, engine = TrainingSettings(steps, seed=7), Watched(**options)
    train_cell(
        workload,
        engine,
        Cell("", variant, 3),
        settings,
        after_step=lambda step: engine.steps.append(engine.optimizer.reduction_stats.last),
    )
    if "shard" not in options:  # in shards late parts follow in further rounds
        assert all(count == 1 for step in engine.steps for count in step.launches.values()), (
            "a bucket left twice"
        )
    orders = [step.launch_order for step in engine.steps]
    for others, weights in hc.allgather_object((orders, fingerprint(engine.model))):
        for ours, theirs in zip(orders, others):  # ranks may have unequal numbers of steps
            assert ours == theirs, "ranks launched buckets in different orders"
            assert ours == sorted(ours) or "shard" in options, "buckets left in another order"
        assert weights == fingerprint(engine.model), "ranks differ"
    if workload.static and hc.size() > 1 and "shard" not in options:
        assert not [step.late_gradients for step in engine.steps[1:] if step.late_gradients]
    reference = make_reference(expected or workload, hc.size(), settings)
    trained = {name: parameter.detach() for name, parameter in engine.model.named_parameters()}
    distance, _, worst = largest_difference(trained, reference.parameters, reference.start)
    assert distance <= tolerance, f"{worst} differs from one process by {distance}"
    moved, _, _ = largest_difference(reference.start, reference.parameters, reference.start)
    assert moved > 100 * tolerance, "the reference did not train"
    return engine
