"""Plans in less time than they take by default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def quick_planner(smallest: bool = False) -> Iterator[None]:
    """Few measurements of time and a short search: bytes and results are what is looked at.

    Args:
        smallest: "min" is as small as it gets at any cost, with heads in chunks though the logits are few.
    """
    values: dict[str, Any] = {
        "kinds._SECONDS_PER_KIND": 0.0,
        "candidates._LOOKS": 20_000,
        "planner._TIMED": 1,
    }
    if smallest:
        values |= {"planner.MIN_SLOWDOWN": 1e9, "head._LEAST_BYTES": 0, "head._LEAST_ROWS": 1}
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(f"hvd_ckpt.planning.{name}", value))
        yield
