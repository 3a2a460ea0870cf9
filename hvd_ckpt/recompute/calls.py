"""Tensors in the nested values that functions take and return, and facts about torch functions that a tape asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Functions that draw random numbers: those that PyTorch says are, and composites of them.
_RANDOM = {
    "alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "gru",
    "gumbel_softmax", "lstm", "multi_head_attention_forward", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_",
    "scaled_dot_product_attention", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices", "pca_lowrank", "svd_lowrank",
}  # fmt: skip


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order; one that is there twice comes twice."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def map_tensors(change: Callable[[Any], Any], kind: type | tuple[type, ...], value: Any) -> Any:
    """``value`` with ``change`` applied to everything of that kind in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(change, kind, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(change, kind, item) for item in value]
    if isinstance(value, dict):
        return {name: map_tensors(change, kind, item) for name, item in value.items()}
    return value


def separate_tensors(
    values: Sequence[Any],
) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], list[Any]]]:
    """The tensors among some values, and a function that gives the values with other tensors in their place."""
    is_tensor = [isinstance(value, torch.Tensor) for value in values]
    others = [None if tensor else value for value, tensor in zip(values, is_tensor)]

    def with_tensors(tensors: Iterable[torch.Tensor]) -> list[Any]:
        remaining = iter(tensors)
        return [next(remaining) if tensor else other for other, tensor in zip(others, is_tensor)]

    return [value for value in values if isinstance(value, torch.Tensor)], with_tensors


@functools.cache
def call_name(func: Callable[..., Any]) -> str:
    """A name by which a call is recognized: ``linear``, ``add``, ``T.__get__``."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name == "__get__":
        return f"{getattr(getattr(func, '__self__', None), '__name__', '?')}.__get__"
    return str(name)


@functools.cache
def is_random(func: Callable[..., Any]) -> bool:
    """Whether the function may draw random numbers."""
    name = call_name(func)
    if name in _RANDOM:
        return True
    for candidate in (name, name.rstrip("_"), f"{name.rstrip('_')}_"):
        packet = getattr(torch.ops.aten, candidate, None)
        if packet is None or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                return True
    return False


def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call, by its name or by an argument, changes its first argument and returns it."""
    name = call_name(func)
    if name.endswith("_") and not name.endswith("__"):
        return True
    # Where torch.nn gives ``inplace`` by position, it is the last argument, after ``training``.
    return kwargs.get("inplace") is True or ("dropout" in name and len(args) > 3 and args[3] is True)
