"""Memory budgets and how they are written: ``6GiB``, ``0.3x``, ``80%``, ``min``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hvd_ckpt.planning.plan import Plan

MIN_SLOWDOWN = 2.0  # "min": the smallest peak whose step takes at most this many times as long
_MOST = 2.0**62
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power


class BudgetError(ValueError):
    """No plan fits the budget. The message names the smallest peak and the block that determines it.

    Attributes:
        smallest: the smallest reachable peak in bytes.
        nearest: the measured plan with the smallest peak, or None if that does not fit the device.
    """

    def __init__(self, message: str, smallest: int, nearest: Plan | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.nearest = nearest

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, Plan | None]]:
        # Rank 0 sends the error to the other ranks by pickle, which would call the class with ``args``, the message alone.
        return type(self), (str(self), self.smallest, self.nearest)


@dataclass(frozen=True)
class Budget:
    """A memory budget, which may depend on the model or the device.

    Attributes:
        kind: ``bytes``, ``share`` (of the peak without recomputation), ``device`` (share of the device's memory), ``min`` or
            ``fastest``.
        value: bytes or share.
    """

    kind: str
    value: float = 0.0

    def __str__(self) -> str:
        value = self.value
        shown = {"bytes": f"{value:.0f}", "share": f"{value:g}x", "device": f"{100 * value:g}%"}
        return shown.get(self.kind, self.kind)

    @property
    def is_absolute(self) -> bool:
        """Whether the budget is the same number of bytes for every model."""
        return self.kind in ("bytes", "device")

    def bytes(self, baseline: int, device: torch.device) -> int | None:
        """The budget in bytes above the start of a step, but for ``min``; None for the fastest plan."""
        if self.kind == "fastest":
            return None
        if self.kind == "share":
            return int(self.value * baseline)
        if self.kind == "device":
            return device_budget(self.value, device)
        return int(self.value)


Given = int | float | str | Budget | None
"""The forms of a budget that a user may give."""


def parse_budget(budget: Given) -> Budget:
    """Parses a budget. Called once, where a user gives it; other code takes a :class:`Budget`.

    Args:
        budget: bytes as a number or as text with a unit (``"6GiB"``, ``"512MB"``); ``"0.3x"`` of the peak without recomputation;
            ``"80%"`` of the device's memory; ``"min"``; None or ``"fastest"`` for the fastest plan at any memory. A
            :class:`Budget` stays as it is.

    Raises:
        ValueError: the budget is anything else.
    """
    wrong = f"budget must be bytes, or text such as '6GiB', '0.3x', '80%', 'min' or 'fastest', got {budget!r}"
    if isinstance(budget, Budget):
        return budget
    if budget is None:
        return Budget("fastest")
    if isinstance(budget, (int, float)) and not isinstance(budget, bool):
        if not 1 <= budget <= _MOST:
            raise ValueError(wrong)
        return Budget("bytes", budget)
    if not isinstance(budget, str):
        raise ValueError(wrong)
    text = budget.strip()
    if text.lower() in ("min", "fastest"):
        return Budget(text.lower())
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*|%)", text)
    if match is None or not 0 < float(match[1]) <= _MOST:
        raise ValueError(wrong)
    value, unit = float(match[1]), match[2]
    if unit.lower() == "x":
        return Budget("share", value)
    if unit == "%":
        if value > 100:
            raise ValueError(f"budget: {text} is more than the device has: give at most 100%")
        return Budget("device", value / 100)
    if unit.upper() not in _UNITS:
        raise ValueError(wrong)
    count = value * _UNITS[unit.upper()]
    if count < 1:
        raise ValueError(
            f"budget: '{text}' is less than a byte: did you mean '{text}x', a share of the peak without recomputation?"
        )
    return Budget("bytes", count)


def device_budget(share: float, device: torch.device) -> int:
    """Bytes that a step may allocate within ``share`` of the memory, less what the process (CUDA: the device) uses already. On CPUs
    the memory of a rank is an equal part of what the ranks of its host may use."""
    if device.type == "cuda":
        import torch

        from hvd_ckpt.utils.memory import free_memory

        total = torch.cuda.mem_get_info(device)[1]
        held = total - free_memory(device)
    else:
        import psutil

        from hvd_ckpt.processes.grid import current
        from hvd_ckpt.utils.machine import machine_memory

        total = machine_memory()[0] // max(current().local_size, 1)
        held = psutil.Process().memory_info().rss
    return max(int(share * total) - held, 1)
