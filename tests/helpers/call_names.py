"""The torch functions that a piece of code calls."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hvd_ckpt.recompute.calls import call_name, tensors_in


class CallNames(TorchFunctionMode):
    """Records the names of the calls inside it that return tensors, in ``names``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):
            self.names.append(call_name(func))
        return result


def names_of_calls(function: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """The calls of a function, whose effects on modules and random numbers are undone."""
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function)
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), CallNames() as mode:
        function(*args)
    random.setstate(states[0])
    np.random.set_state(states[1])
    return tuple(mode.names)
