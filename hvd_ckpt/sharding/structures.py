"""The tensors in what a module returns, or leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["tensors_left_in", "tensors_within"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, data classes and other objects, each once; not those inside of modules."""
    seen: set[int] = set()
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            open_values += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            open_values += one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            open_values += (getattr(one, part.name, None) for part in dataclasses.fields(one))
        elif not callable(one):
            open_values += getattr(one, "__dict__", {}).values()


_USUAL = frozenset(nn.Module().__dict__)
_LONGEST = 64  # a container of more values is data, no list of losses

_seen: Any = WeakTensorKeyDictionary()  # tensor -> those who have got it


def tensors_left_in(module: nn.Module, finder: object) -> Iterator[torch.Tensor]:
    """The results of operations that a module and those inside it have as attributes, such as a loss that is added to the model's
    own later; to each ``finder`` once."""
    for inner in module.modules():
        attributes = inner.__dict__
        if len(attributes) == len(_USUAL):
            continue
        for name, value in attributes.items():
            if name in _USUAL or not isinstance(value, (torch.Tensor, list, tuple, dict)):
                continue
            if not isinstance(value, torch.Tensor) and len(value) > _LONGEST:
                continue
            for tensor in (
                (value,)
                if isinstance(value, torch.Tensor)
                else value.values()
                if isinstance(value, dict)
                else value
            ):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    finders = _seen.setdefault(tensor, set())
                    if id(finder) not in finders:
                        finders.add(id(finder))
                        yield tensor
