"""Random masks of a call in bits, which its replay gets back in place of drawing them again, unless a policy says otherwise.

On the CPU, a dropout draws a random number for each element, which takes longer than all else that the call does, and longer than
the rest of an attention that drops out. The outcome is one bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hvd_ckpt.recompute.saved import Compressed, compress
from hvd_ckpt.utils.torch_private import TorchDispatchMode

_DRAW = torch.ops.aten.bernoulli_.float


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the masks that operations draw in it.

    Attributes:
        masks: in order.
        complete: whether no other random numbers were drawn.
        seconds: time that the host spent on drawing them, which a replay does not need.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[Compressed] = []
        self.complete = True
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        # A GPU draws in no time, and would wait for the host here.
        mask = compress(result) if func is _DRAW and result.device.type == "cpu" else None
        if mask is None:
            self.complete = False
        else:
            self.masks.append(mask)
            self.seconds += time.perf_counter() - start
        return result


class Repeating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the operations in it recorded masks, in order, in place of drawing some."""

    def __init__(self, masks: Sequence[Compressed]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What other hooks keep is unpacked here: that may recompute a region, which does not work in a dispatch mode.
        self._masks = iter([mask.unpacked() for mask in masks])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DRAW:
            return args[0].copy_(next(self._masks).get())
        return func(*args, **(kwargs or {}))
