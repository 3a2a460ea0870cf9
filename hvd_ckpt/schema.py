"""Strict schemas for everything that is read from a file or a command line, and one line for what is wrong in one.

It imports pydantic, which takes a moment: commands import it when they run, not to print their help.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hvd_ckpt.json_file import Wrong, loads, shown
from hvd_ckpt.text import one_line

T = TypeVar("T")


class Strict(BaseModel):
    """Base class of schemas: no conversions ("1" is not 1, True is not 1), no unknown keys, no NaN or infinity, no assignment."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def first_error(error: ValidationError) -> str:
    """The first error of a validation in one line: its place, the value, and what is allowed.

    For example ``files["model.safetensors"].bytes is -1, and must be greater than or equal to 0``. What a validator of the schema
    raises as ``ValueError(text)`` appears as ``text``, after the place if it has one.
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


def parse_json(schema: type[T], content: bytes, give: str, repair: str) -> T:
    """The value of a schema in the content of a JSON file; tuples are lists there.

    Args:
        schema: a :class:`Strict` model, or any other type that pydantic can validate.
        give: the way out if the content is not JSON at all, such as "give a file that Plan.save() wrote".
        repair: the way out if it is damaged, such as "make the plan again".

    Raises:
        Wrong: it is too large, not JSON, has a key twice, or does not follow the schema.
    """
    loads(content, give, repair)
    try:
        return TypeAdapter(schema).validate_json(content)
    except ValidationError as error:
        raise Wrong(f"{first_error(error)}: {repair}") from None


def _place(location: tuple[int | str, ...]) -> str:
    text = ""
    for one in location:
        if isinstance(one, int):
            text += f"[{one}]"
        elif one.isidentifier() and len(one) <= 60:
            text += f".{one}" if text else one
        else:
            text += f"[{shown(one)}]"
    return text


def _value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, dict, list, tuple)):
        return shown(list(value) if isinstance(value, tuple) else value)
    return f"a {type(value).__name__}"
