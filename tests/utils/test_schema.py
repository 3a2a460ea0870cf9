"""Tests of what users are told: errors of schemas and warnings about a run are one line each."""

from __future__ import annotations

import math
import warnings
from typing import Annotated

import pytest
from pydantic import Field, ValidationError, model_validator

from hvd_ckpt.utils import run_warnings
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
    expected = Whole(parts={"a b": Part(name="one", sizes=(1, 2))})
    assert parse_json(Whole, content, "give", "repair") == expected


@pytest.mark.parametrize(
    ("content", "way_out"),
    [
        (b"", "repair"),
        (b"\xff", "give"),
        (b"[" * 100_000, "repair"),
        (b'{"parts": {"x": {"name": "y"}}, "parts": {"x": {"name": "y"}}}', "repair"),
        (b'{"parts": {"x": {"name": "y"}}, "share": 1e999}', "repair"),
        (b'{"parts": {"x": {"name": "y"}}, "share": true}', "repair"),
        (b'{"parts": {"x": {"name": "y"}}, "share": ' + b"9" * 5000 + b"}", "repair"),
    ],
)
def test_hostile_json(content, way_out):
    with pytest.raises(Wrong, match=rf": {way_out}$"):
        parse_json(Whole, content, "give", "repair")


@pytest.mark.parametrize("content", [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1.0, "a": 1.0}'])
def test_what_json_does_not_have_is_refused_whatever_the_schema(content):
    with pytest.raises(Wrong, match=r": repair$"):
        parse_json(dict[str, float], content, "give", "repair")


def test_a_warning_about_a_run_is_one_line_and_one_about_code_as_python_prints_it(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings in place of printing them.
        warnings.showwarning = lambda *of: print(warnings.formatwarning(*of[:4]), end="")
        run_warnings.warn("the disk is full")
        warnings.warn("a mistake in code", stacklevel=1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Warning: the disk is full"
    assert "UserWarning: a mistake in code" in printed[1] and __file__ in printed[1]
