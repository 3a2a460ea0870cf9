"""State of one rank: random numbers, buffers, and the state of modules that no ``state_dict`` has."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
from stateful import Stateful
from torch import Tensor, nn


def seed_all(seed: int) -> None:
    """Seeds PyTorch's generator, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values):
            buffer.copy_(value)


def hidden_of(model: nn.Module) -> list[Any]:
    return [module.hidden() for module in model.modules() if isinstance(module, Stateful)]


def set_hidden(model: nn.Module, values: list[Any]) -> None:
    stateful = (module for module in model.modules() if isinstance(module, Stateful))
    for module, value in zip(stateful, values):
        module.set_hidden(value)


def as_tensor(state: Any) -> Tensor:
    """A tensor as it is; of anything else a digest."""
    if isinstance(state, Tensor):
        return state.clone()
    text = repr(_plain(state)).encode()
    return torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)


def _plain(state: Any) -> Any:
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray | Tensor) else state
