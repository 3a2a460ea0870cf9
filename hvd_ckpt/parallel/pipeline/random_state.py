"""Random state of a micro-batch and a block, in place of that of a process.

A process has one random generator. So the numbers that dropout draws in a block depend on everything that the process drew before:
on the number of stages and on the schedule. Here, each forward pass of a model in training mode draws one number, its key, from
PyTorch's default generator. Each block runs with generators that are seeded with the key and the position of the block, and nothing
else is drawn from the default generator. So the random state of a block depends on three things only: the default generator at the
beginning of the step, the micro-batch and the block. A snapshot with the default generator has all of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hvd_ckpt.utils.frames import remembered

Model = TypeVar("Model", bound=nn.Sequential)
_MASK = 2**64 - 1


@dataclass
class _Entered:
    """A model or a block that runs: the key of its pass, the states of generators to restore, and the place run last in it."""

    key: int | None
    states: list[Tensor]
    place: int


class _ThreadKeys(threading.local):
    def __init__(self) -> None:
        self.entered: list[_Entered] = []  # from the outside in


_thread = _ThreadKeys()


def seed_blocks(model: Model) -> Model:
    """Gives each block of a chain its own random state in each forward pass.

    In training mode, a forward pass of ``model`` draws one number from PyTorch's default CPU generator. Blocks run with generators
    (of the CPU and of the current CUDA device) that are seeded with this number and their position, and do not change the default
    generators. :class:`hvd_ckpt.Pipeline` runs every model in this way. With ``seed_blocks``, a model without stages draws the same
    numbers, so that :func:`hvd_ckpt.accumulate` gives the bits of the pipeline with any number of stages, also with dropout.

    Recomputation by :func:`hvd_ckpt.checkpoint`, and by everything that uses it, draws the same numbers again.
    ``torch.utils.checkpoint`` around single blocks does not.

    Args:
        model: a chain of this library or an ``nn.Sequential``; its blocks get hooks.

    Returns:
        ``model``.

    Raises:
        TypeError: the model is not a chain.
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"seed_blocks takes a chain or an nn.Sequential, got {type(model).__name__}")
    if _Enter(0).register(model):
        seed_each(list(model))
    return model


def seed_each(blocks: list[nn.Module]) -> None:
    """Adds the hooks of :func:`seed_blocks` to all blocks of a chain; one may stand at several places."""
    for number, block in enumerate(blocks, start=1):
        _Enter(number).register(block)


def draw_key() -> int:
    """Draws the key of a forward pass from the default generator."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


@contextlib.contextmanager
def forward_pass(key: int | None, place: int = 0) -> Iterator[None]:
    """A context in which blocks run with generators seeded by the key, and other code with one that is the same on all stages.

    Args:
        place: the number of blocks before the first one that runs.
    """
    _enter(key, 0, place)
    try:
        yield
    finally:
        _leave()


class _Enter:
    """A hook of a model, of number 0, or of a block, of the numbers of its places."""

    def __init__(self, number: int) -> None:
        self.numbers = [number]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.numbers[0]:
            # A recomputation has the key of the forward pass of its region, which may not be the pass that this thread is in.
            _enter(*remembered(self._next))
        else:
            _enter(remembered(draw_key) if module.training else None, 0)

    def _next(self) -> tuple[int | None, int]:
        """The key of the pass around the block, and the block's next place in it."""
        if not _thread.entered:
            return None, self.numbers[0]
        around = _thread.entered[-1]
        around.place = min(
            (number for number in self.numbers if number > around.place), default=self.numbers[0]
        )
        return around.key, around.place

    def register(self, module: nn.Module) -> bool:
        """Adds the hook and one behind it, unless the module has one as a model or block; returns whether it had none."""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Enter) and bool(hook.numbers[0]) == bool(self.numbers[0]):
                hook.numbers = sorted({*hook.numbers, *self.numbers})
                return False
        module.register_forward_pre_hook(self)
        # Also after an error: else the key would stay on this thread's stack, and the block's random state in the generators.
        module.register_forward_hook(_leave, always_call=True)
        return True


def _enter(key: int | None, number: int, place: int = 0) -> None:
    # Number 0 is the model, whose generator serves everything between blocks; blocks have 1, 2, ... The states from outside are
    # saved here and restored in _leave(), so blocks draw nothing from them. Without a key (evaluation), generators are left alone.
    _thread.entered.append(_Entered(key, [] if key is None else _states(), place))
    if key is not None:
        seed = _mixed(key, number)
        torch.default_generator.manual_seed(seed)
        if _uses_cuda():
            torch.cuda.manual_seed(seed)


def _leave(*_: Any) -> None:
    states = _thread.entered.pop().states
    for state, put_back in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state)):
        put_back(state)


def _states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _uses_cuda() else [])]


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mixed(key: int, number: int) -> int:
    """A seed from a key and a number, by SplitMix64 (Steele, Lea and Flood, 2014): neighbouring numbers give unrelated seeds."""
    mixed = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) & (_MASK >> 1)
