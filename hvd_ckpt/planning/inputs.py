"""Copies of the arguments of a model or a block. Planning runs it many times, and must not change the caller's tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.recompute.reach import reach
from hvd_ckpt.utils.fingerprint import fingerprint


def copied(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers and objects with ``change(tensor)`` for each tensor. Modules and parameters are shared."""
    reached = reach(values)
    # deepcopy() takes what the memo has for a copy. So a module that an argument refers to, such as a layer's owner, is shared.
    memo: dict[int, Any] = {id(module): module for module in reached.modules}
    with _Tensors(change) as mode:
        for tensor in reached.tensors:
            mode.copy(tensor, memo)
        try:
            return copy.deepcopy(values, memo)
        except Exception:  # an object that cannot be copied is shared
            return map_tensors(lambda tensor: mode.copy(tensor, memo), Tensor, values)


class _Tensors(TorchFunctionMode):
    """A mode in which ``copy.deepcopy`` copies tensors by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change

    def copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor if isinstance(tensor, nn.Parameter) else self._change(tensor)
        result: Tensor = memo[id(tensor)]
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensor.__deepcopy__ refuses tensors that are not leaves of the graph, and copies parameters.
        if func is Tensor.__deepcopy__:
            return self.copy(*args)
        return func(*args, **(kwargs or {}))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested containers and objects, each once."""
    return reach(value).tensors


def fingerprints(tensors: Iterable[Tensor | None]) -> list[int]:
    """Fingerprints by which two runs are compared bit for bit; 0 for None."""
    return [0 if tensor is None else int(fingerprint(tensor)) for tensor in tensors]


def left_by(model: nn.Module, inputs: Iterable[Tensor]) -> list[int]:
    """Fingerprints of what a backward pass leaves: gradients, buffers and the random state.

    A policy that draws more or fewer numbers would change the dropout of all later steps.
    """
    gradients = [tensor.grad for tensor in (*model.parameters(), *inputs)]
    return fingerprints([*gradients, *model.buffers(), torch.get_rng_state()])


def in_words(error: Exception) -> str:
    """An error of the user's code as one short line. Lack of memory says nothing about the code, and is raised."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        raise error
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
