"""``CheckpointFunction``: a checkpoint that gets its parameters as arguments, as in the pytorch-checkpoint project (csrhddlam)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from hvd_ckpt.recompute.checkpoint import run_checkpointed
from hvd_ckpt.recompute.keeper import changed_in_place, version_of
from hvd_ckpt.recompute.region import Options
from hvd_ckpt.recompute.state import requires_grad_of, requiring_grad


class CheckpointFunction:
    """``CheckpointFunction.apply(function, n, *args)`` runs ``function(*args[:n])`` and recomputes it in the backward pass.

    It is :func:`hvd_ckpt.checkpoint` in the non-reentrant variant, by the name and the call of the pytorch-checkpoint project. The
    gradient of a parameter is the sum over all calls that use it, and accumulates once in a backward pass.

    Args:
        function: returns a tensor, or a structure of tensors. It reaches its parameters by itself (as a bound method or a closure).
        n: number of ``args`` that are inputs. Inputs may be any values.
        args: the inputs, followed by the parameters that the function uses. (Others get their gradients, too.)

    Raises:
        TypeError: ``function`` cannot be called, ``n`` is not an int, or an argument after the first n is not a tensor.
        ValueError: ``n`` is negative or larger than the number of arguments.
        RuntimeError (in the backward pass): one of the parameters in ``args`` was changed in place after the forward pass.
    """

    @staticmethod
    def apply(function: Any, n: int, *args: Any) -> Any:
        """Runs ``function(*args[:n])``; see the class."""
        _check(function, n, args)
        again = _Again(args[n:])
        outputs = run_checkpointed(function, args[:n], {}, Options(context_fn=lambda: (nullcontext(), again)))
        return tuple(outputs) if isinstance(outputs, list) else outputs


class _Again(ExitStack):
    """The context of the recomputations: with the parameters of the forward pass, which have not changed."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__()
        self._parameters = parameters
        self._flags = requires_grad_of(parameters)
        self._versions = [version_of(parameter) for parameter in parameters]

    def __enter__(self) -> _Again:
        for parameter, version in zip(self._parameters, self._versions):
            if version_of(parameter) != version:
                raise changed_in_place(version, version_of(parameter), "CheckpointFunction")
        self.enter_context(requiring_grad(self._parameters, self._flags))
        return self


def _check(function: Any, n: Any, args: Sequence[Any]) -> None:
    if not callable(function):
        raise TypeError(f"CheckpointFunction needs something to call, got {type(function).__name__}.")
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"The number of inputs must be an int, got {n!r}.")
    if not 0 <= n <= len(args):
        raise ValueError(
            f"The number of inputs must be between 0 and the {len(args)} arguments given, got {n}."
        )
    for position, arg in enumerate(args[n:]):
        if not isinstance(arg, torch.Tensor):
            raise TypeError(
                f"Arguments after the first {n} are parameters and must be tensors, got {type(arg).__name__} at "
                f"position {n + position}."
            )
