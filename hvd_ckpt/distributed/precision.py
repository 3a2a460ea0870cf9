"""Mixed precision that every rank agrees on.

An overflow on one rank must make all ranks skip the same step; otherwise their weights and loss scales diverge. Here gradients are
reduced before they are unscaled: an inf or nan on one rank is also in the sum, so all ranks find it.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from hvd_ckpt.collectives.agreement import raise_on_replica, raise_together
from hvd_ckpt.collectives.asynchronous import Collectives
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.utils.extras import apex_unavailable as apex_unavailable
from hvd_ckpt.utils.text import PRECISIONS

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions that run under ``torch.autocast``, and its dtypes."""


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that makes the same decision on all ranks, so that PyTorch's usual code is correct.

    ::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                       # optional: reduces, then unscales; clip after it
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)                           # reduces, unless that is done
        scaler.update()

    It works with any optimizer. Gradients of a ``DistributedOptimizer`` are reduced before they are unscaled and checked, so all
    ranks take or skip the same step. Pipeline stages and tensor-parallel parts each need one ``DistributedOptimizer``; an overflow
    on one of them skips the step on all.

    Args:
        device: the device type of the gradients; by default "cuda" where there is a GPU, else "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in ``torch.amp.GradScaler``.
    """

    def __init__(self, device: str | None = None, *options: Any, **named_options: Any) -> None:
        super().__init__(device or _default_device(), *options, **named_options)
        # Optimizers whose gradients unscale_() has reduced since the last update().
        self._reduced: set[int] = set()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduces the gradients over the ranks, unless that is done, and divides them by the scale.

        If you skip the step that follows, call ``update()`` before the next step, as with ``torch.amp.GradScaler``.
        """
        if not isinstance(optimizer, ReducedOptimizer):
            super().unscale_(optimizer)
            return
        optimizer.reduce_for_caller()
        if not self._enabled:
            return
        self._begin_on_every_rank()
        self._reduced.add(id(optimizer))
        error: Exception | None = None
        try:
            with optimizer.unscaling():
                super().unscale_(optimizer)
        except ValueError as exception:  # float16 gradients; another rank, stage or part may have none
            error = exception
        if not (optimizer.finds_overflow_alone or current().model_parallel_size > 1):
            if error is not None:
                raise error
            return
        # What was found must be exchanged. A rank without gradients has found nothing, and takes part all the same.
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        anywhere = any(bool(value) for value in found.values())
        # Errors first: a rank that raised alone would be missing from the exchanges below.
        members = optimizer.process_set
        if optimizer.finds_overflow_alone:
            try:
                raise_together(error, members, "hvd_ckpt.unscale")
            except Exception as exception:
                error = exception
        raise_on_replica(error)
        if optimizer.finds_overflow_alone:
            own = torch.tensor([anywhere], dtype=torch.float64)
            anywhere = Collectives(members, "hvd_ckpt").maximum(own, "found_inf")[0] > 0
        anywhere = current().on_any_stage(anywhere)
        # torch asserts in its step() that something was checked, also on a rank that has no gradients.
        found.setdefault(torch.device("cpu"), torch.zeros((), dtype=torch.float32))
        for value in found.values():
            value.fill_(float(anywhere))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Reduces and unscales, unless that is done, and steps if no gradient is inf or nan on any rank.

        Raises:
            RuntimeError: a backward pass has added to gradients since ``unscale_()``.
        """
        if not self._enabled or not isinstance(optimizer, ReducedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        self._begin_on_every_rank()
        if id(optimizer) in self._reduced:
            optimizer.check_reduced()
        else:
            optimizer.reduce_for_caller()
        self._reduced.discard(id(optimizer))
        with optimizer.without_reduction():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale, as in ``torch.amp.GradScaler``. Every optimizer then begins a new step."""
        self._reduced.clear()
        super().update(new_scale)

    def _begin_on_every_rank(self) -> None:
        """Makes the scale where no loss has been scaled: by a rank without a batch, or before the last pipeline stage."""
        if self._scale is None and current().size > 1:
            self.scale(torch.zeros((), dtype=torch.float32, device=self._device))


class Precision:
    """One interface to mixed precision of ``torch.autocast`` and of NVIDIA Apex.

    ::

        precision = Precision("bf16")
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        model, optimizer = precision.prepare(model, optimizer)
        with precision.autocast():
            loss = loss_function(model(x), y)
        precision.backward(loss, optimizer)
        precision.step(optimizer)

    Args:
        name: "fp32"; "fp16" or "bf16" (``torch.autocast``; fp16 with a :class:`GradScaler`); "apex-O0" to "apex-O3" (NVIDIA Apex's
            ``apex.amp`` with Horovod's recipe; needs CUDA and an Apex up to 25.05).
        device: device type, by default "cuda" where there is a GPU, else "cpu".
        scaler_options: arguments of :class:`GradScaler` (fp16 only).

    Raises:
        ValueError: the name is not in :data:`PRECISIONS`.
        RuntimeError: Apex is requested and cannot be used here; the message has the reason.
    """

    def __init__(self, name: str, device: str | None = None, **scaler_options: Any) -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision '{name}' is unknown; choose one of {', '.join(PRECISIONS)}")
        self.name = name
        self.device = device or _default_device()
        self.scaler: GradScaler | None = GradScaler(self.device, **scaler_options) if name == "fp16" else None
        self._amp: ModuleType | None = None
        if name.startswith("apex-"):
            reason = apex_unavailable()
            if reason is not None:
                raise RuntimeError(
                    f"precision '{name}' cannot be used: {reason}; use --precision fp16 or bf16 instead"
                )
            self._amp = importlib.import_module("apex.amp")

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Prepares model and optimizer. The optimizer must be a ``DistributedOptimizer`` already.

        Apex's O2 puts float32 master weights into the optimizer and converts the model to float16. O3 only converts the model. The
        gradients of the model's parameters are reduced, so the ``DistributedOptimizer`` must be created first, from these
        parameters.

        Raises:
            RuntimeError: with Apex, the optimizer is not a ``DistributedOptimizer`` yet.
        """
        if self._amp is None:
            return model, optimizer
        if not isinstance(optimizer, ReducedOptimizer):
            raise RuntimeError(
                f"precision '{self.name}': wrap the optimizer with DistributedOptimizer before Precision.prepare(); "
                f"Apex may replace its parameters by master weights, whose gradients are not the ones to reduce"
            )
        model, optimizer = self._amp.initialize(
            model, optimizer, opt_level=self.name.removeprefix("apex-"), verbosity=0
        )
        return model, optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward pass and loss."""
        dtype = AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self.device, dtype=dtype)

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, last: bool = True) -> None:
        """The backward pass of one (micro-)batch.

        Args:
            last: False if more backward passes follow before the step.
        """
        if self._amp is not None:
            with self._amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
                # Within the context, at whose end Apex unscales: an overflow of another rank must be in the
                # gradients by then.
                if last and isinstance(optimizer, ReducedOptimizer):
                    optimizer.synchronize()
        elif self.scaler is not None:
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduces and unscales the gradients, so that they can be clipped before :meth:`step`."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        elif isinstance(optimizer, ReducedOptimizer):
            optimizer.reduce_for_caller()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step. It is skipped on every rank if gradients have overflowed."""
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        elif isinstance(optimizer, ReducedOptimizer):
            optimizer.reduce_for_caller()
            with optimizer.without_reduction():
                optimizer.step()
        else:
            optimizer.step()
