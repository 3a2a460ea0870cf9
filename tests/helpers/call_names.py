"""The torch functions that a piece of code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_ckpt.recompute.calls import CallMode, call_name, tensors_in


class CallNames(CallMode):
    """Records the names of the calls inside it that return tensors, in ``names``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if any(True for _ in tensors_in(result)):
            self.names.append(call_name(func))
        return result
