"""What values of a tree that somebody may have made must be; each check raises Wrong with the place of what is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hvd_ckpt.json_file import Wrong, shown

__all__ = [
    "Check",
    "counts",
    "described",
    "dictionary",
    "each",
    "in_words",
    "is_number",
    "names",
    "number",
    "tensors",
    "texts_as_keys",
    "whole",
]

MOST = 2**62
Check = Callable[[Any, str], None]


def each(value: Any, place: str, checks: Mapping[str, Check]) -> None:
    """Raises Wrong unless it is a dict with these keys at least, whose values pass."""
    texts_as_keys(value, place)
    for name, check in checks.items():
        if name not in value:
            raise Wrong(f"{place} has no {name}")
        check(value[name], f"{place}.{name}")


def texts_as_keys(value: Any, place: str) -> None:
    """Raises Wrong unless it is a dict whose keys are texts."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise Wrong(f"{place} is {described(value)}, and must be a dict with texts as keys")


def dictionary(value: Any, place: str) -> None:
    """Raises Wrong unless it is a dict."""
    if not isinstance(value, dict):
        raise Wrong(f"{place} is {in_words(value)}, and must be a dict")


def names(value: Any, place: str) -> None:
    """Raises Wrong unless it is a list of texts, each once."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Wrong(f"{place} is {in_words(value)}, and must be a list of names")
    if len(set(value)) < len(value):
        raise Wrong(f"{place} has a name twice")


def counts(value: Any, place: str) -> None:
    """Raises Wrong unless it is a dict of texts and whole numbers from 0."""
    texts_as_keys(value, place)
    for name, count in value.items():
        whole(0)(count, f"{place}[{shown(name)}]")


def tensors(value: Any, place: str) -> None:
    """Raises Wrong unless it is a dict of texts and tensors."""
    texts_as_keys(value, place)
    for name, one in value.items():
        if not isinstance(one, Tensor):
            raise Wrong(f"{place}[{shown(name)}] is {in_words(one)}, and must be a tensor")


def whole(least: int, most: int = MOST) -> Check:
    """A check that raises Wrong unless it is a whole number from ``least`` to ``most``."""

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Wrong(f"{place} is {in_words(value)}, and must be a whole number from {least}")

    return check


def number(least: float, most: float = math.inf, *, above: bool = False) -> Check:
    """A check that raises Wrong unless it is a finite number from ``least`` to ``most``, or ``above`` it."""

    def check(value: Any, place: str) -> None:
        if not is_number(value) or value < least or value > most or (above and value == least):
            wanted = "a finite number" + (
                "" if least == -math.inf else f" {'above' if above else 'from'} {least:g}"
            )
            raise Wrong(f"{place} is {in_words(value)}, and must be {wanted}")

    return check


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= MOST if isinstance(value, int) else math.isfinite(value)


def in_words(value: Any) -> str:
    """A value in a message: what it is if it is short and plain, else its kind."""
    if value is None or isinstance(value, (bool, int, str)):
        return shown(value)
    return str(value) if isinstance(value, float) else described(value)


def described(value: Any) -> str:
    """What kind of value it is, in a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
