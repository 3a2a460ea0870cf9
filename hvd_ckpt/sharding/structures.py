"""The tensors in what a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["tensors_within"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.nn.Module)


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
