"""Mixed precision for every engine alike: what a training loop does in each precision, and the engine's part in it.

``fp16`` and ``bf16`` are ``torch.autocast``; fp16 scales the loss with the engine's gradient scaler. ``apex-O1`` is NVIDIA Apex's
``apex.amp``, by the recipe of each engine's documentation.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hvd_ckpt.bench.compare.engines import Engine

__all__ = ["AUTOCAST", "EnginePrecision"]

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EnginePrecision:
    """The precision of one training run.

    Args:
        name: one of :data:`~hvd_ckpt.bench.compare.cells.PRECISIONS`.
        device: where the model is.
        engine: who reduces the gradients; None for the reference, which is one process.
        scales_loss: scale the loss in other precisions than fp16, too.
    """

    def __init__(self, name: str, device: torch.device, engine: Engine | None, scales_loss: bool) -> None:
        self._name, self._device, self._engine = name, device, engine
        self._amp: ModuleType | None = importlib.import_module("apex.amp") if name == "apex-O1" else None
        self._optimizer: Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None
        if self._amp is None and (name == "fp16" or scales_loss):
            make = torch.amp.GradScaler if engine is None else engine.grad_scaler
            self._scaler = make(device.type)

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int) -> tuple[nn.Module, Optimizer]:
        """Lets the engine wrap model and optimizer, and Apex before or after it, as the engine wants it."""
        engine = self._engine
        if self._amp is not None and (engine is None or engine.wraps_after_apex):
            model, optimizer = self._amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        if engine is not None:
            model, optimizer = engine.wrap(model, optimizer, passes)
            if self._amp is not None and not engine.wraps_after_apex:
                model, optimizer = self._amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
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
                if self._engine is not None:
                    self._engine.after_apex_backward(self._optimizer)
        elif self._scaler is not None:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """The update, skipped where scaled gradients have overflowed."""
        if self._scaler is not None:
            if self._engine is None:
                self._scaler.step(optimizer)
            else:
                self._engine.scaled_step(self._scaler, optimizer)
            self._scaler.update()
        elif self._amp is not None and self._engine is not None:
            self._engine.apex_step(optimizer)
        else:
            optimizer.step()
