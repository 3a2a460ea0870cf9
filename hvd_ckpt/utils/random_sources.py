"""Sources of random numbers in PyTorch, NumPy and Python, and generators of any kind, with their states."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Objects that draw random numbers from a state of their own."""


class Source(NamedTuple):
    """A source of random numbers and its noted state."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any

    def moved(self) -> bool:
        """Whether numbers have been drawn since the state was noted."""
        return not _equal(self.get(), self.state)

    def restore(self) -> None:
        self.set(self.state)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return all(_equal(value, theirs[name]) for name, value in ours.items())
    # A long tuple has plain numbers, as the 625 of Python's generator, and is compared at once.
    if isinstance(ours, tuple) and len(ours) < 100:
        return all(map(_equal, ours, theirs))
    return bool(ours == theirs)


def source_of(generator: Any) -> Source:
    """One of :data:`GENERATORS` with its current state. That of the operating system has none."""
    if isinstance(generator, random.SystemRandom):
        return Source(lambda: None, lambda state: None, None)
    if isinstance(generator, random.Random):
        return Source(generator.getstate, generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state)
    return Source(generator.get_state, generator.set_state, generator.get_state())


def global_sources() -> list[Source]:
    """The generators of Python and of NumPy with their current states."""
    return [
        Source(random.getstate, random.setstate, random.getstate()),
        Source(_numpy.get, np.random.set_state, _numpy.get()),
    ]


def torch_sources(tensors: Iterable[Tensor]) -> list[Source]:
    """PyTorch's generators of the CPU and of the devices of some tensors with their current states."""
    found = [Source(torch.get_rng_state, torch.set_rng_state, torch.get_rng_state())]
    for device in {tensor.device: None for tensor in tensors if tensor.device.type != "cpu"}:
        kind = getattr(torch, device.type, None)
        if getattr(kind, "_initialized", False):  # otherwise nothing was drawn there
            found.append(_of_device(kind, device))
    return found


def _of_device(kind: Any, device: torch.device) -> Source:
    def get() -> Tensor:
        state: Tensor = kind.get_rng_state(device)
        return state

    return Source(get, lambda state: kind.set_rng_state(state, device), get())


@contextlib.contextmanager
def drawing_from(sources: Iterable[Source]) -> Iterator[None]:
    """A context in which random numbers are drawn from the noted states. Afterwards, the states are as before."""
    with contextlib.ExitStack() as restore:
        for source in sources:
            restore.callback(source.set, source.get())
            source.restore()
        yield


class _NumpyState:
    """State of NumPy's global generator. Reading it takes 30 us; comparing its memory with the last reading takes less than one."""

    def __init__(self) -> None:
        self._known: tuple[bytes, Any] | None = None

    def get(self) -> Any:
        """The state, as of ``np.random.get_state()``."""
        words = self._words()
        if self._known is None or words is None or self._known[0] != words or self._known[1][3]:
            state = np.random.get_state()
            # The generator may hold a second normal number in reserve: drawing that one leaves the words as they are.
            self._known = (words, state) if words is not None else None
            return state
        return self._known[1]

    @staticmethod
    def _words() -> bytes | None:
        """The words of the Mersenne twister and its position; None for another generator."""
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is not np.random.MT19937:
            return None
        return ctypes.string_at(bits.ctypes.state_address, 4 * 624 + 4)


_numpy = _NumpyState()
