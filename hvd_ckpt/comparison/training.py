"""One training run, the same lines for every engine, and what is left of it to compare.

Every rank starts from different weights, so an engine that does not make them equal is found out; the reference has
rank 0's. Before the first step each rank gets a random state of its own, which dropout draws from: an engine
whose recomputation draws again, or not the same, is found out too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvd_ckpt.comparison.cells import VARIANTS, Cell

if TYPE_CHECKING:
    from hvd_ckpt.comparison.engines import Engine
    from hvd_ckpt.comparison.workloads import Workload

__all__ = ["CheckpointedChain", "Trained", "build_seed", "fingerprint", "step_seed", "train"]


@dataclass
class Trained:
    """What a training run left on one rank.

    Attributes:
        chain: the trained model, unwrapped.
        losses: this rank's loss before each step.
        seconds: this rank's time for each step: zero_grad, forward, backward and update.
    """

    chain: nn.Sequential
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class CheckpointedChain(nn.Module):
    """A chain whose forward pass recomputes as a cell says, with an engine's ``checkpoint_sequential``."""

    def __init__(self, chain: nn.Sequential, cell: Cell, checkpoint_sequential: Callable[..., Any]) -> None:
        super().__init__()
        self.chain = chain
        self._chunks = cell.chunks
        self._use_reentrant = VARIANTS[cell.variant].use_reentrant
        self._checkpoint_sequential = checkpoint_sequential

    def forward(self, *inputs: torch.Tensor, **shared: Any) -> Any:
        if self._use_reentrant is None:
            return self.chain(*inputs, **shared)
        return self._checkpoint_sequential(
            list(self.chain), self._chunks, *inputs, use_reentrant=self._use_reentrant, **shared
        )


def build_seed(seed: int, rank: int) -> int:
    """The seed of a rank's first weights; the engines make them rank 0's."""
    return seed * 10_007 + rank


def step_seed(seed: int, rank: int) -> int:
    """The seed of a rank's random state before its first step."""
    return seed * 10_007 + 5_003 + rank


def train(
    workload: Workload,
    engine: Engine,
    cell: Cell,
    *,
    steps: int,
    seed: int,
    after_step: Callable[[int], object] = lambda step: None,
) -> Trained:
    """Train one cell from the start for ``steps`` steps; every rank of the job calls it."""
    torch.manual_seed(build_seed(seed, engine.rank))
    trained = Trained(workload.model())
    model: nn.Module = CheckpointedChain(trained.chain, cell, engine.checkpoint_sequential)
    model, optimizer = engine.wrap(model, workload.optimizer(model.parameters()))
    torch.manual_seed(step_seed(seed, engine.rank))
    for step in range(steps):
        batch = workload.batch(engine.rank, engine.size, step)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = workload.loss(model(*batch.inputs, **batch.shared), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        trained.seconds.append(time.perf_counter() - start)
        trained.losses.append(loss.item())
        after_step(step)
    return trained


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, types, shapes and every bit of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
