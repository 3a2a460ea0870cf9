"""A checkpointed function as PyTorch gets to see it: its first call is the first pass, every later one a
recomputation.

Both of PyTorch's checkpoint variants, and this library's own :class:`CheckpointFunction`, call a function
once in the forward pass and again for the backward pass. Wrapping the function is therefore all that is
needed to know which run is which; the caller's own ``context_fn`` and ``debug`` stay free for the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_ckpt.batchnorm.deferred import RunningStatistics
from hvd_ckpt.frames import Frame, Phase
from hvd_ckpt.recompute.reach import Reach


class Region:
    """One checkpointed call of ``function``, which can reach what ``found`` lists."""

    def __init__(self, function: Callable[..., Any], found: Reach) -> None:
        self.function = function
        self._frame = Frame()
        self._statistics = RunningStatistics(found.modules)
        self._started = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Even a first pass that is still running counts as started: a function that computes gradients inside
        # itself is recomputed in the middle of it.
        if self._started:
            with self._frame.enter(Phase.RECOMPUTE), self._statistics.recomputation():
                return self.function(*args, **kwargs)
        self._started = True
        with self._frame.enter(Phase.FORWARD), self._statistics.first_pass():
            return self.function(*args, **kwargs)
