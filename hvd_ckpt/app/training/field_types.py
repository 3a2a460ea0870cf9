"""Types of settings: the values that a field of the training configuration may have.

A type is one of pydantic's with a check, which raises a ValueError in one line. Flags, YAML files and Python use the same types.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.utils.text import STAGES, read_when, stage_of, unknown


def one_of(what: str, *names: str) -> AfterValidator:
    """A check that a text is one of these names; the error has the nearest one."""

    def check(value: Any) -> Any:
        if value is not None and value not in names:
            raise ValueError(unknown(what, value, names))
        return value

    return AfterValidator(check)


def _text(value: str) -> str:
    if not value.strip() or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{value!r} is not allowed: give a text, in UTF-8")
    return value


def _stage(value: Any) -> Any:
    return STAGES[stage_of(value)]


def _budget(value: str | int) -> str | int:
    parse_budget(value)
    return value


def _when(value: str | int) -> str | int:
    return read_when(value, "the setting")


def first_and_last(steps: str) -> tuple[int, int]:
    """The first and the last of the steps ``FIRST:LAST``, counted from 1.

    Raises:
        ValueError: they are not such steps.
    """
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", steps)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"{steps!r} is not allowed: give the first and the last step, such as '10:15'")
    return int(match[1]), int(match[2])


def _steps(value: Any) -> Any:
    if isinstance(value, int):  # YAML 1.1 takes 10:15 for a number, ten minutes and fifteen seconds
        value = f"{value // 60}:{value % 60}"
    if isinstance(value, str):
        first_and_last(value)
    return value


def _or_none(value: Any) -> Any:
    # A flag can take back what a file sets, as a text, since a flag has no other form for None.
    return None if value == "none" else value


def _groups(value: Any) -> Any:
    lists = isinstance(value, list) and all(isinstance(group, list) and group for group in value)
    if value in (None, "host") or (lists and all(type(rank) is int for group in value for rank in group)):
        return value
    raise ValueError(f"{value!r} is not allowed: give host, or lists of ranks such as [[0, 1], [2, 3]]")


Text = Annotated[str, AfterValidator(_text)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Options = dict[str, JsonValue]
Budget = Annotated[str | int, AfterValidator(_budget)]
When = Annotated[str | int, AfterValidator(_when)]
ShardStage = Annotated[str, BeforeValidator(_stage)]
Steps = Annotated[str, BeforeValidator(_steps)]
Groups = Annotated[Any, AfterValidator(_groups)]
Offload = Annotated[
    str | None, BeforeValidator(_or_none), one_of("thing to offload", "optimizer", "parameters", "none")
]
