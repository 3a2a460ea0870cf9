"""What the values of settings may be: each parser takes what a file or a flag says, and gives the value or says what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hvd_ckpt.names import unknown
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.sharding.stages import STAGES

__all__ = [
    "Parser",
    "budget",
    "mapping",
    "number",
    "one_of",
    "one_of_or_none",
    "stage",
    "text",
    "truth",
    "whole",
]

NESTED = 20

Parser = Callable[[Any], Any]


def text(value: Any) -> str:
    if "\0" in str(value):
        raise ValueError("give a text without NUL characters")
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip():
        return str(value)
    raise ValueError("give a text")


def whole(least: int, most: int = 2**63 - 1) -> Parser:
    def parse(value: Any) -> int:
        try:
            number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value))
        except ValueError:
            raise ValueError(f"give a whole number from {least}") from None
        if not least <= number <= most:
            raise ValueError(f"give a whole number from {least}" + (f" to {most}" if number > most else ""))
        return number

    return parse


def number(least: float, most: float = math.inf, *, above: bool = False) -> Parser:
    def parse(value: Any) -> float:
        wanted = f"give a number {'above' if above else 'from'} {least:g}" + (
            f" to {most:g}" if most < math.inf else ""
        )
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(wanted) from None
        if not math.isfinite(number) or number < least or number > most or (above and number == least):
            raise ValueError(wanted)
        return number

    return parse


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("give true or false")


def one_of(what: str, known: tuple[str, ...]) -> Parser:
    def parse(value: Any) -> str:
        if value not in known:
            raise ValueError(unknown(what, str(value), known))
        return str(value)

    return parse


def one_of_or_none(what: str, known: tuple[str, ...]) -> Parser:
    """As :func:`one_of`; "none" is None, so that a flag can take back what a file says."""
    parse = one_of(what, ("none", *known))
    return lambda value: None if parse(value) == "none" else value


def budget(value: Any) -> str | int:
    parse_budget(value)
    return value if isinstance(value, int) else str(value)


def stage(value: Any) -> str:
    """A name of :data:`~hvd_ckpt.sharding.stages.STAGES`, or its number."""
    known = {str(number): name for number, name in enumerate(STAGES)}
    if not isinstance(value, (bool, float)) and str(value) in known:
        return known[str(value)]
    if value not in STAGES:
        raise ValueError(f"give {', '.join(STAGES[:-1])} or {STAGES[-1]}, or 0 to {len(STAGES) - 1}")
    return str(value)


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("give names with their values")
    if not _is_plain(value):
        raise ValueError("give numbers, texts, true, false or lists as values")
    return dict(value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether any file can hold it."""
    if isinstance(value, (list, tuple)):
        return depth < NESTED and all(_is_plain(one, depth + 1) for one in value)
    if isinstance(value, Mapping):
        return depth < NESTED and all(
            isinstance(name, str) and _is_plain(one, depth + 1) for name, one in value.items()
        )
    return (
        value is None
        or isinstance(value, (bool, float, str))
        or (isinstance(value, int) and abs(value) < 2**63)
    )
