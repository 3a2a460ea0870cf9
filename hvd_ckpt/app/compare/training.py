"""One training run, the same lines for every engine and every precision, and its result.

Every rank starts from different weights, so an engine that does not make them equal is found out; the reference has
rank 0's. Before the first step each rank gets a random state of its own, which dropout draws from: an engine
whose recomputation draws again, or not the same, is found out too.

``fp16`` and ``bf16`` are ``torch.autocast``; fp16 scales the loss with the engine's gradient scaler. ``apex-O1`` is NVIDIA Apex's
``apex.amp``, by the recipe of each engine's documentation.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_ckpt.app.compare.cells import Cell, Recompute, Settings
from hvd_ckpt.app.compare.recording import Recording, recording_of
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.workloads import Step, Workload
from hvd_ckpt.utils.measure import now

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EnginePrecision:
    """The precision of one training run.

    Args:
        name: ``fp32``, ``fp16``, ``bf16`` or ``apex-O1``.
        device: where the model is.
        engine: who reduces the gradients.
        scales_loss: scale the loss in other precisions than fp16, too.
    """

    def __init__(self, name: str, device: torch.device, engine: Engine, scales_loss: bool) -> None:
        self._name, self._device, self._engine = name, device, engine
        self._amp: ModuleType | None = importlib.import_module("apex.amp") if name == "apex-O1" else None
        self._optimizer: Optimizer | None = None
        scaled = self._amp is None and (name == "fp16" or scales_loss)
        self._scaler = engine.grad_scaler(device.type) if scaled else None

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int) -> tuple[nn.Module, Optimizer]:
        """Lets the engine wrap model and optimizer, and Apex before or after it, as the engine wants it."""
        # Apex wants a model before DDP wraps it, and Horovod's optimizer before Apex patches it.
        for after_apex in (True, False):
            if self._amp is not None and self._engine.wraps_after_apex is after_apex:
                model, optimizer = self._amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
            if after_apex:
                model, optimizer = self._engine.wrap(model, optimizer, passes)
        self._optimizer = optimizer
        return model, optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass and its loss."""
        if self._name not in AUTOCAST:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=AUTOCAST[self._name])

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of one loss."""
        if self._amp is not None:
            with self._amp.scale_loss(loss, self._optimizer) as scaled:
                scaled.backward()
                self._engine.after_apex_backward(self._optimizer)
        else:
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """The update, skipped where scaled gradients have overflowed."""
        if self._scaler is not None:
            self._engine.scaled_step(self._scaler, optimizer)
            self._scaler.update()
        elif self._amp is not None:
            self._engine.apex_step(optimizer)
        else:
            optimizer.step()


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
    # Other weights on each rank: an engine that does not make them equal is found out.
    torch.manual_seed(build_seed(settings.seed, engine.rank))
    bare = workload.model(Recompute(cell, engine)).to(device)
    trained = Trained(bare)
    parameters = dict(bare.named_parameters())
    step_precision = EnginePrecision(settings.precision, device, engine, workload.scales_loss)
    model, optimizer = step_precision.wrap(bare, workload.optimizer(parameters.values()), workload.passes)
    prepare(bare)
    # After wrapping and planning, which may draw numbers: dropout starts from the same state in every engine.
    torch.manual_seed(step_seed(settings.seed, engine.rank))
    if record_in is not None:
        trained.recording = Recording(parameters)
        watching = recording_of(engine, trained.recording, model, record_in)
    else:
        watching = nullcontext()
    with watching, engine.uneven(model) if workload.uneven else nullcontext():
        for number in range(workload.steps_of(engine.rank, engine.size, settings.steps)):
            batches = [batch.to(device) for batch in workload.batches(engine.rank, engine.size, number)]
            workload.before_step(bare, number)
            start = now(device)
            optimizer.zero_grad()
            step = Step(
                model,
                engine.rank,
                engine.size,
                number,
                batches,
                autocast=step_precision.autocast,
                backward=step_precision.backward,
            )
            losses = workload.run(step)
            step_precision.step(optimizer)
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
