"""One training run, the same lines for every engine and every precision, and its result.

Every rank starts from different weights, so an engine that does not make them equal is found out; the reference has
rank 0's. Before the first step each rank gets a random state of its own, which dropout draws from: an engine
whose recomputation draws again, or not the same, is found out too.

``fp16`` and ``bf16`` are ``torch.autocast``; fp16 scales the loss with the engine's gradient scaler. ``apex-O1`` is NVIDIA Apex's
``apex.amp``, by the recipe of each engine's documentation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_ckpt.app.compare.cells import KEEP, Cell, Recompute, TrainingSettings
from hvd_ckpt.app.compare.recording import Recording, recording_of
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.workloads import Workload
from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.utils.measure import now


class Training:
    """The training of a workload's model by an engine on one rank: the two halves of a step, and the result.

    Args:
        seed: of the first weights.

    Attributes:
        bare: the workload's model; ``model``, ``optimizer``: what to train with.
        rank, size, number, batches: of the step: which rank of how many, which step (from 0), and what it trains on.
        seconds: this rank's time for each step: zero_grad, forward, backward and update.
        recording: the reductions, if they were recorded.
    """

    def __init__(
        self,
        workload: Workload,
        engine: Engine,
        settings: TrainingSettings,
        seed: int,
        recompute: Recompute = KEEP,
    ) -> None:
        self.workload, self.engine, self.device = workload, engine, torch.device(settings.device)
        torch.manual_seed(seed)
        self.bare = workload.model(recompute).to(self.device)
        self._autocast = AUTOCAST.get(settings.precision)
        self._amp = importlib.import_module("apex.amp") if settings.precision == "apex-O1" else None
        scaled = self._amp is None and (settings.precision == "fp16" or workload.scales_loss)
        self._scaler = engine.grad_scaler(self.device.type) if scaled else None
        self.model, self.optimizer = self._wrap(workload.optimizer(self.bare.parameters()))
        self.seconds: list[float] = []
        self.recording: Recording | None = None

    def _wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = self.bare
        # Apex wants a model before DDP wraps it, and Horovod's optimizer before Apex patches it.
        for after_apex in (True, False):
            if self._amp is not None and self.engine.wraps_after_apex is after_apex:
                model, optimizer = self._amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
            if after_apex:
                model, optimizer = self.engine.wrap(model, optimizer, self.workload.passes)
        return model, optimizer

    def begin(self, rank: int, size: int, number: int) -> None:
        """Begins a step of one rank: its batches come to where the model is."""
        self.rank, self.size, self.number = rank, size, number
        self.batches = [batch.to(self.device) for batch in self.workload.batches(rank, size, number)]

    def gradients(self) -> list[torch.Tensor]:
        """The forward and backward passes of the step; returns the loss of each batch."""
        self.optimizer.zero_grad()
        return self.workload.run(self)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass and its loss."""
        return torch.autocast(self.device.type, dtype=self._autocast) if self._autocast else nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of one loss."""
        if self._amp is not None:
            with self._amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
                self.engine.after_apex_backward(self.optimizer)
        else:
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward()

    def update(self) -> None:
        """The update, skipped where scaled gradients have overflowed."""
        if self._scaler is not None:
            self.engine.scaled_step(self._scaler, self.optimizer)
            self._scaler.update()
        elif self._amp is not None:
            self.engine.update(self.model, self.optimizer)
        else:
            self.optimizer.step()


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
    settings: TrainingSettings,
    *,
    record_in: Path | None = None,
    after_step: Callable[[int], object] = lambda step: None,
) -> Training:
    """Trains one cell from the start; every rank of the job calls it.

    Args:
        record_in: a folder, if the reductions are to be recorded; the same on all ranks.
    """
    rank, size = engine.rank, engine.size
    # Other weights on each rank: an engine that does not make them equal is found out.
    trained = Training(workload, engine, settings, build_seed(settings.seed, rank), Recompute(cell, engine))
    # After wrapping, which may draw numbers: dropout starts from the same state in every engine.
    torch.manual_seed(step_seed(settings.seed, rank))
    with contextlib.ExitStack() as contexts:
        if record_in is not None:
            trained.recording = Recording(dict(trained.bare.named_parameters()))
            contexts.enter_context(recording_of(engine, trained.recording, trained.model, record_in))
        if workload.uneven:
            contexts.enter_context(engine.uneven(trained.model))
        for number in range(workload.steps_of(rank, size, settings.steps)):
            trained.begin(rank, size, number)
            workload.before_step(trained.bare, number)
            start = now(trained.device)
            trained.gradients()
            trained.update()
            trained.seconds.append(now(trained.device) - start)
            if trained.recording is not None:
                trained.recording.close_step()
            after_step(number)
    return trained


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, types, shapes and every bit of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
