"""What PyTorch itself offers for the same step: :mod:`torch.utils.checkpoint` around every block, or around segments of a chain.

For the plot of ``hvd-ckpt plan --peers``: steps of all are measured in turn, since a machine gets slower and faster while
it measures. ``hvd-ckpt bench recompute`` compares with more, and more carefully.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hvd_ckpt.measure import now, undisturbed
from hvd_ckpt.memory import Marks
from hvd_ckpt.planning.plan import Cost, Plan
from hvd_ckpt.planning.profile import Step

__all__ = ["Form", "Measured", "Timeline", "every_block", "measure", "peers_of", "sequential"]

Form = Callable[[nn.Module], contextlib.AbstractContextManager[object]]
"""Makes the model run in a certain way for a while."""

Timeline = tuple[tuple[float, int], ...]
CHUNKS = (2, 3, 4, 6, 8, 12, 16, 24)


@contextlib.contextmanager
def every_block(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Each of the modules of these names is checkpointed."""
    modules = [model.get_submodule(name) for name in names]
    with contextlib.ExitStack() as stack:
        for module in modules:
            checkpointed = functools.partial(checkpoint, module.forward, use_reentrant=False)
            # With its signature, by which a chain tells which of the shared arguments a block takes.
            stack.enter_context(_forward(module, functools.update_wrapper(checkpointed, module.forward)))
        yield


def sequential(model: nn.Module, chunks: int) -> contextlib.AbstractContextManager[None]:
    """The children of the model, an ``nn.Sequential``, are checkpointed in this many segments."""
    children = list(model.children())
    return _forward(
        model,
        lambda input: checkpoint_sequential(children, chunks, input, use_reentrant=False),  # type: ignore[no-untyped-call]
    )


def peers_of(model: nn.Module, plan: Plan) -> dict[str, Form]:
    """Those that the model can be run with, by name."""
    names = [name for block in plan.blocks for name in block.members]
    found: dict[str, Form] = {"every block": functools.partial(every_block, names=names)}
    if type(model).forward is nn.Sequential.forward:
        for chunks in CHUNKS:
            if chunks < len(list(model.children())):
                found[f"sequential {chunks}"] = functools.partial(sequential, chunks=chunks)
    return found


class Measured(NamedTuple):
    """What a step takes in one form.

    Attributes:
        cost: exact peak, median time.
        forward_seconds: of forward and loss, median.
        timeline: (seconds, bytes above the start) while the memory was recorded, which takes longer than a step; empty on CUDA.
    """

    cost: Cost
    forward_seconds: float
    timeline: Timeline


def measure(
    step: Step, forms: Mapping[str, Form], rounds: int, say: Callable[[str], object]
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measures a step in each form, its rounds in turn.

    Returns:
        Those that ran, and for those that failed the first line of the error.
    """
    peaks: dict[str, tuple[int, Timeline]] = {}
    failures: dict[str, str] = {}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}

    def peak(name: str) -> None:
        step.run()
        peaks[name] = step.peak()

    def attempt(name: str, work: Callable[[str], None]) -> None:
        if name in failures:
            return
        try:
            with forms[name](step.model):
                work(name)
        except Exception as error:
            failures[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]

    with undisturbed(step.model, step.device):
        for name in forms:
            say(f"measuring the memory of {name}")
            attempt(name, peak)
        for number in range(rounds):
            say(f"timing, round {number + 1} of {rounds}")
            for name in forms if number % 2 == 0 else reversed(list(forms)):
                attempt(name, lambda name: seconds[name].append(_timed(step)))
    found = {}
    for name in forms:
        if name not in failures:
            whole, forward = (statistics.median(times) for times in zip(*seconds[name]))
            found[name] = Measured(Cost(peaks[name][0], whole), forward, peaks[name][1])
    return found, failures


class _Clock(Marks):
    """Takes the time where a step marks the end of its forward pass."""

    def mark(self, name: str) -> None:
        self.moment = now(self._device)


def _timed(step: Step) -> tuple[float, float]:
    """Seconds of a step, and of its forward pass with the loss."""
    clock = _Clock(step.device)
    start = now(step.device)
    step.run(clock)
    return now(step.device) - start, clock.moment - start


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module has this ``forward`` for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
