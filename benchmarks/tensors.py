"""The tensors of a state, in an order that is the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dicts, in the order of the keys."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for _, part in sorted(value.items(), key=lambda item: str(item[0])):
            yield from tensors_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)
