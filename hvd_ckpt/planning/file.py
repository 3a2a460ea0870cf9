"""A plan as a file: JSON that people can read, and that is taken at no word of its own.

The fields are those of the dataclasses (:class:`~hvd_ckpt.planning.plan.Plan` and what it is made of), written and checked
by their type hints; treatments, which blocks share, are listed once and referred to by number. A plan file may come from
anywhere, so every value is checked for its type and range, nothing in it is executed or imported, and a field that this
version does not know is an error: to leave it out could change what a plan does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from pathlib import Path
from typing import Any

from hvd_ckpt.json_file import Wrong, read_json, shown, write_json
from hvd_ckpt.planning.plan import BlockPlan, Plan, PlanError
from hvd_ckpt.planning.treatment import Treatment
from hvd_ckpt.recompute.tape import Policy

__all__ = ["FORMAT", "VERSION", "read", "write"]

FORMAT = "hvd_ckpt plan"
VERSION = 1

GIVE = "give a file that Plan.save() wrote"
AGAIN = "correct it, or make the plan again"

MAX_NESTING = 100  # of segments; each takes a dozen frames of Python's stack when it runs
MAX_TEXT = 1000  # characters of one name

# Classes whose fields are left out where they are at their defaults: their files stay readable when a field is added.
_SPARSE = (Treatment, Policy)
_SIGNED = ("added_seconds", "timelines")  # all other numbers are zero or more
_TIMELINES = ("before", "after")


def write(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan; the file is there whole or not at all.

    Raises:
        PlanError: the plan could not be read back, such as one with a cost that is no number.
        OSError: the file cannot be written.
    """
    path = Path(path)
    treatments = list(dict.fromkeys(block.treatment for block in plan.blocks))
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "treatments": [_plain(one) for one in treatments],
    }
    for field in dataclasses.fields(Plan):
        document[field.name] = _plain(getattr(plan, field.name))
    for block, plain in zip(plan.blocks, document["blocks"]):
        plain["treatment"] = treatments.index(block.treatment)
    document["items"] = _named(plan, plan.items)
    try:
        _Document(document).plan()
    except Wrong as error:
        raise PlanError(f"The plan cannot be written to '{path}': {error}.") from None
    write_json(document, path)


def read(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that :func:`write` wrote.

    Raises:
        PlanError: it is no plan file, or a damaged one, or of another version; one sentence that says where in it and what to do.
        OSError: there is no such file, or it must not be read.
    """
    path = Path(path)
    try:
        return _Document(read_json(path, GIVE, AGAIN)).plan()
    except Wrong as error:
        raise PlanError(f"The plan file '{path}' cannot be used: {error}.") from None


class _Document:
    """The content of a plan file, which becomes a plan if all of it is right."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.treatments: tuple[Treatment, ...] = ()

    def plan(self) -> Plan:
        content = self.content
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise Wrong(f'it does not say "format": "{FORMAT}": {GIVE}')
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            raise Wrong(
                f"it is of version {shown(version)}, and this library reads version {VERSION}: make the plan again, or use the "
                "version of hvd_ckpt that wrote it"
            )
        names = {field.name for field in dataclasses.fields(Plan)}
        required = (names | {"treatments"}) - {"autocast"}  # which plans had not at first
        _check_keys(content, names | {"format", "version", "treatments"}, required, "")
        self.treatments = self.parse(tuple[Treatment, ...], content["treatments"], "treatments")
        hints = _hints(Plan)
        fields = {
            name: self.parse(hints[name], content[name], name)
            for name in sorted(names - {"items"})
            if name in content
        }
        items = self.items(content["items"], fields["blocks"])
        for name in fields["timelines"]:
            if name not in _TIMELINES:
                raise _wrong(f"timelines.{_key(name)}", f"is none of {', '.join(_TIMELINES)}")
        if fields.get("autocast") not in (None, "bfloat16", "float16"):
            raise _wrong("autocast", f"is {shown(fields['autocast'])}, and must be null, bfloat16 or float16")
        return Plan(items=items, **fields)

    def parse(self, hint: Any, value: Any, place: str) -> Any:
        """The value as what its type hint says."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            (kind,) = (one for one in inner if one is not types.NoneType)
            return None if value is None else self.parse(kind, value, place)
        if origin is tuple or origin is frozenset:
            return self.sequence(origin, inner, value, place)
        if origin is dict:
            _check_kind(value, dict, "an object", place)
            return {name: self.parse(inner[1], one, f"{place}.{_key(name)}") for name, one in value.items()}
        if hasattr(hint, "_fields"):
            return self.record(hint, frozenset(), value, place)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(typing.cast("type[Any]", hint), value, place)
        return _scalar(hint, value, place)

    def sequence(self, kind: type, inner: tuple[Any, ...], value: Any, place: str) -> Any:
        _check_kind(value, list, "a list", place)
        if kind is tuple and Ellipsis not in inner:
            if len(value) != len(inner):
                raise _wrong(place, f"has {len(value)} entries, and must have {len(inner)}")
            return tuple(
                self.parse(one, entry, f"{place}[{at}]") for at, (one, entry) in enumerate(zip(inner, value))
            )
        found = kind(self.parse(inner[0], entry, f"{place}[{at}]") for at, entry in enumerate(value))
        if len(found) < len(value):
            raise _wrong(place, "has an entry twice")
        return found

    def dataclass(self, kind: type[Any], value: Any, place: str) -> Any:
        optional = {
            field.name
            for field in dataclasses.fields(kind)
            if kind in _SPARSE and field.default is not dataclasses.MISSING
        }
        record = self.record(kind, frozenset(optional), value, place)
        if kind is Policy:
            _check_calls(record, place)
        if kind is BlockPlan:
            _check_members(record.members, f"{place}.members")
            if record.treatment >= len(self.treatments):
                raise _wrong(
                    f"{place}.treatment",
                    f"is {record.treatment}, and there are {len(self.treatments)} treatments, numbered from 0",
                )
            record = dataclasses.replace(record, treatment=self.treatments[record.treatment])
        return record

    def record(self, kind: Any, optional: frozenset[str], value: Any, place: str) -> Any:
        hints = _hints(kind)
        _check_kind(value, dict, "an object", place)
        _check_keys(value, set(hints), set(hints) - optional, f"{place}.")
        fields = {name: self.parse(hints[name], one, f"{place}.{name}") for name, one in value.items()}
        try:
            return kind(**fields)
        except ValueError as error:
            raise _wrong(place, f"cannot be: {error}") from None

    def items(self, value: Any, blocks: tuple[BlockPlan, ...]) -> tuple[Any, ...]:
        """Names of the blocks, in order and each once, in nested lists."""
        _check_kind(value, list, "a list", "items")
        position = 0

        def level(entries: list[Any], place: str, depth: int) -> tuple[Any, ...]:
            nonlocal position
            found: list[Any] = []
            for at, entry in enumerate(entries):
                here = f"{place}[{at}]"
                if isinstance(entry, list):
                    if not entry or depth == MAX_NESTING:
                        raise _wrong(
                            here,
                            "is an empty segment" if not entry else f"is nested more than {MAX_NESTING} deep",
                        )
                    start = position
                    found.append(level(entry, here, depth + 1))
                    _check_segment(blocks[start:position], here)
                    continue
                expected = blocks[position].name if position < len(blocks) else None
                if not isinstance(entry, str) or entry != expected:
                    wanted = (
                        f"the block {shown(expected)} stands" if expected is not None else "the blocks end"
                    )
                    raise _wrong(here, f"is {shown(entry)} where {wanted}")
                found.append(position)
                position += 1
            return tuple(found)

        items = level(value, "items", 0)
        if position < len(blocks):
            raise _wrong("items", f"ends before the block {shown(blocks[position].name)}")
        return items


def _scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is bool:
        _check_kind(value, bool, "true or false", place)
        return value
    if kind is str:
        _check_kind(value, str, "a text", place)
        if len(value) > MAX_TEXT or not value.isprintable():
            raise _wrong(
                place, f"is {shown(value)}, and must be printable and of at most {MAX_TEXT} characters"
            )
        return value
    assert kind in (int, float), f"no rule for {kind} at {place}"
    signed = any(part in place for part in _SIGNED)
    what = "a whole number" if kind is int else "a number"
    least = "" if signed else " from 0"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise _wrong(place, f"is {shown(value)}, and must be {what}{least}")
    if (not signed and value < 0) or not abs(value) < 2**63 or not math.isfinite(value):
        raise _wrong(place, f"is {shown(value)}, and must be {what}{least} below 2**63")
    return kind(value)


def _check_kind(value: Any, kind: type, what: str, place: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(place, f"is {shown(value)}, and must be {what}")


def _check_keys(value: dict[str, Any], known: set[str], required: set[str], place: str) -> None:
    for name in sorted(required - set(value)):
        raise _wrong(f"{place}{name}", "is missing")
    for name in value:
        if name not in known:
            raise _wrong(f"{place}{_key(name)}", "is nothing this version of hvd_ckpt knows")


def _check_members(members: tuple[str, ...], place: str) -> None:
    if not members:
        raise _wrong(place, "is empty")
    if len({name.rpartition(".")[0] for name in members}) > 1 or len(set(members)) < len(members):
        raise _wrong(place, "are not different modules of one container")


def _check_calls(policy: Policy, place: str) -> None:
    """Every set of numbers in a policy is one of calls."""
    count = len(policy.calls)
    for field in dataclasses.fields(policy):
        numbers = getattr(policy, field.name)
        if isinstance(numbers, frozenset) and max(numbers, default=-1) >= count:
            raise _wrong(
                f"{place}.{field.name}",
                f"has the number {max(numbers)}, and there are {count} calls, numbered from 0",
            )


def _check_segment(blocks: tuple[BlockPlan, ...], place: str) -> None:
    if len({name.rpartition(".")[0] for block in blocks for name in block.members}) > 1:
        raise _wrong(place, "is a segment of blocks that are not in one container")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a class's fields, as they are in a file."""
    return {**typing.get_type_hints(kind), **({"treatment": int} if kind is BlockPlan else {})}


def _wrong(place: str, what: str) -> Wrong:
    place = place if len(place) <= 100 else f"{place[:60]}...{place[-30:]}"
    return Wrong(f"{place} {what}: {AGAIN}")


def _key(name: str) -> str:
    return shown(name)[1:-1]


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not (
                isinstance(value, _SPARSE)
                and field.name != "title"
                and getattr(value, field.name) == field.default
            )
        }
    if hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(one) for one in value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def _named(plan: Plan, items: tuple[Any, ...]) -> list[Any]:
    return [_named(plan, item) if isinstance(item, tuple) else plan.blocks[item].name for item in items]
