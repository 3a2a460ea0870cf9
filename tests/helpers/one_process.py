"""The reference: one process that computes each rank's batch in turn and averages the gradients.

Every rank runs it by itself, without communication, and compares its own parameters with the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

WIDTH = 8
SMALL = 0.0002  # MiB: a bucket per parameter of a chain


def batch(step: int, rank: int, part: int = 0, width: int = WIDTH) -> torch.Tensor:
    """Input of (step, rank, micro-batch): the same wherever it is computed."""
    generator = torch.Generator().manual_seed(1_000_000 * part + 1000 * step + rank + 1)
    return torch.randn(4, width, generator=generator)


def chain(layers: int = 4) -> nn.Sequential:
    """Layers that can be used one by one, with the same weights on every rank."""
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks)


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


def trained(model: nn.Module, bare: Any = None, steps: int = 2, **options: Any) -> tuple[Any, Any]:
    """The model and its distributed optimizer after some steps."""
    optimizer = wrap(model, bare, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def train_for_all(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, op: Any = hc.Average
) -> None:
    """The reference of :func:`train`."""
    for step in steps:
        optimizer.zero_grad()
        loss_of_all(model, step, op).backward()
        optimizer.step()


def fingerprint(model: nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def raises_everywhere(
    kind: type[Exception] | tuple[type[Exception], ...], match: str, work: Callable[[], Any]
) -> str:
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


def check_weights(
    model: nn.Module, reference: nn.Module, optimizer: Any = None, tolerance: float = 1e-6
) -> None:
    """The weights are those of the reference, and the same on all ranks. Collective."""
    with contextlib.nullcontext() if optimizer is None else optimizer.gathered_parameters():
        assert difference(model, reference) < tolerance
        same_everywhere(model)
