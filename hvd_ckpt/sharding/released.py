"""What a sharded optimizer is made of after ``unshard()``: nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["Released"]


class Released:
    """Has no groups and is of stage 0.

    Raises:
        RuntimeError: anything else is asked for.
    """

    stage = 0

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "this optimizer has given the model its parameters back in unshard(), and cannot be used any more; wrap a new torch "
            "optimizer with DistributedOptimizer"
        )
