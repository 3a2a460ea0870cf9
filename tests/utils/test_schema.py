"""Tests of schemas: errors in one line."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
from pydantic import Field, ValidationError, model_validator

from hvd_ckpt.utils.plain_data import parse_json
from hvd_ckpt.utils.schema import Strict, Wrong, first_error


class Part(Strict):
    name: str
    sizes: tuple[Annotated[int, Field(ge=0)], ...] = ()


class Whole(Strict):
    parts: dict[str, Part]
    share: float = 0.5

    @model_validator(mode="after")
    def has_parts(self) -> Whole:
        if not self.parts:
            raise ValueError("parts has no part")
        return self


GOOD = {"parts": {"a b": {"name": "one", "sizes": (1, 2)}}}


@pytest.mark.parametrize(
    ("parts", "more", "named"),
    [
        ({"a b": {"name": 3}}, {}, ['parts["a b"].name', "3"]),
        ({"x": {"name": "y", "sizes": (1, -4)}}, {}, ["parts.x.sizes[1]", "-4", "0"]),
        ({"x": {}}, {}, ["parts.x.name", "missing"]),
        ({"x": {"name": "y"}}, {"odd\nkey": 1}, ['["odd\\nkey"]', "not a known key"]),
        ({"x": {"name": "y"}}, {"share": math.nan}, ["share", "nan"]),
        ({"x": {"name": "y"}}, {"share": "a" * 10_000}, ["share", "aaa..."]),
        ({"x": {"name": 10**5000}}, {}, ["parts.x.name", "a very large number"]),
        ({"x": {"name": b"\xff"}}, {}, ["parts.x.name", "a bytes"]),
        ({}, {}, ["parts has no part"]),
        ([[]], {}, ["parts", "a list"]),
    ],
)
def test_error_names_place_and_value_in_one_line(parts, more, named):
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate({"parts": parts, **more})
    text = first_error(caught.value)
    assert all(one in text for one in named), text
    assert text.isprintable() and len(text) <= 900


def test_schema_of_json():
    content = b'{"parts": {"a b": {"name": "one", "sizes": [1, 2]}}}'
    assert parse_json(Whole, content, "give", "repair") == Whole.model_validate(GOOD)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"parts": {"x": {"name": "y"}}, "parts": {"x": {"name": "y"}}}',
        b'{"parts": {"x": {"name": "y"}}, "share": NaN}',
        b'{"parts": {"x": {"name": "y"}}, "share": 1e999}',
        b'{"parts": {"x": {"name": "y"}}, "share": true}',
        b'{"parts": {"x": {"name": "y"}}, "share": ' + b"9" * 5000 + b"}",
    ],
)
def test_hostile_json(content):
    with pytest.raises(Wrong, match=r": (give|repair)$"):
        parse_json(Whole, content, "give", "repair")


@pytest.mark.parametrize("content", [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1.0, "a": 1.0}'])
def test_what_json_does_not_have_is_refused_whatever_the_schema(content):
    with pytest.raises(Wrong, match=r": repair$"):
        parse_json(dict[str, float], content, "give", "repair")
