"""One training run, the same lines for every engine, and its result.

Every rank starts from different weights, so an engine that does not make them equal is found out; the reference has
rank 0's. Before the first step each rank gets a random state of its own, which dropout draws from: an engine
whose recomputation draws again, or not the same, is found out too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from hvd_ckpt.bench.compare.cells import Cell, Settings
from hvd_ckpt.bench.compare.engines import Engine
from hvd_ckpt.bench.compare.precision import EnginePrecision
from hvd_ckpt.bench.compare.recomputing import Recompute
from hvd_ckpt.bench.compare.recording import Recording
from hvd_ckpt.bench.compare.workloads import Step, Workload
from hvd_ckpt.measure import now

__all__ = ["Trained", "build_seed", "fingerprint", "step_seed", "train"]


@dataclass
class Trained:
    """The result of a training run on one rank.

    Attributes:
        model: the trained model, unwrapped; ``parameters``: its parameters, by name.
        losses: this rank's loss before each step; of several batches in a step, their mean.
        seconds: this rank's time for each step: zero_grad, forward, backward and update.
        recording: the reductions, if they were recorded.
    """

    model: nn.Module
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    recording: Recording | None = None


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
    settings: Settings,
    *,
    record_in: Path | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    after_step: Callable[[int], object] = lambda step: None,
) -> Trained:
    """Trains one cell from the start; every rank of the job calls it.

    Args:
        record_in: a folder, if the reductions are to be recorded; the same on all ranks.
        prepare: called with the unwrapped model when the engine has wrapped it, before the first step.
        after_step: called with the number of each step that is done.
    """
    device = torch.device(settings.device)
    torch.manual_seed(build_seed(settings.seed, engine.rank))
    bare = workload.model(Recompute(cell, engine)).to(device)
    trained = Trained(bare)
    parameters = dict(bare.named_parameters())
    mixed = EnginePrecision(settings.precision, device, engine, workload.scales_loss)
    model, optimizer = mixed.wrap(bare, workload.optimizer(parameters.values()), workload.passes)
    prepare(bare)
    torch.manual_seed(step_seed(settings.seed, engine.rank))
    if record_in is not None:
        trained.recording = Recording(parameters)
        watching = engine.recording(trained.recording, model, record_in)
    else:
        watching = nullcontext()
    with watching, engine.uneven(model) if workload.uneven else nullcontext():
        for number in range(workload.steps_of(engine.rank, engine.size, settings.steps)):
            batches = [batch.to(device) for batch in workload.batches(engine.rank, engine.size, number)]
            workload.before_step(bare, number)
            start = now(device)
            optimizer.zero_grad()
            step = Step(model, engine.rank, engine.size, number, batches, mixed.autocast, mixed.backward)
            losses = workload.run(step)
            mixed.step(optimizer)
            trained.seconds.append(now(device) - start)
            trained.losses.append(sum(loss.item() for loss in losses) / len(losses))
            if trained.recording is not None:
                trained.recording.close_step()
            after_step(number)
    trained.parameters = engine.weights(bare, optimizer)
    return trained


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, types, shapes and every bit of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
