"""Schemas of values that come from outside: strict, with errors of one line.

This module imports pydantic, which takes a moment. A command imports it when it runs, and not to print its help.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hvd_ckpt.utils.text import one_line


class Wrong(Exception):
    """An error in a file or a state: the reason and the way out, which the caller puts into a sentence."""


def shown(value: Any) -> str:
    """A value as a short text in one line, for messages."""
    if isinstance(value, int) and not -(2**70) < value < 2**70:
        return "a very large number"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:50] + "..." + text[-1]


class Strict(BaseModel):
    """Base class of schemas: no conversions (neither "1" nor True is 1), no unknown keys, no NaN or infinity, no assignment."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def first_error(error: ValidationError) -> str:
    """The first error of a validation in one line: its place, the value, and what is allowed.

    An example: ``files["model.safetensors"].bytes is -1, and must be greater than or equal to 0``. The text of a ``ValueError``
    that a validator of the schema raises is included after the place.
    """
    first = error.errors(include_url=False)[0]
    place, kind, message = _place(first["loc"]), first["type"], first["msg"]
    if kind == "missing":
        text = f"{place} is missing"
    elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
        text = f"{place} is not a known key"
    elif kind == "json_invalid":
        text = f"it is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    elif kind in ("value_error", "assertion_error"):
        reason = str(first["ctx"]["error"])
        text = f"{place}: {reason}" if place else reason
    elif message.startswith("Input should"):
        text = f"{place or 'it'} is {_value(first['input'])}, and must{message.removeprefix('Input should')}"
    else:
        text = f"{place or 'it'} is {_value(first['input'])}: {message[:1].lower()}{message[1:]}"
    return one_line(text)


def _place(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part == "[key]":
            text = f"the key {text}"
        elif part.isidentifier() and len(part) <= 60:
            text += f".{part}" if text else part
        else:
            text += f"[{shown(part)}]"
    return text


def _value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, dict, list, tuple)):
        return shown(list(value) if isinstance(value, tuple) else value)
    return f"a {type(value).__name__}"
