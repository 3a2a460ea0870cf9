"""Plain data from files and command lines: JSON, YAML and ``NAME=VALUE``.

Nothing is executed, aliases are not expanded, and each error is one line. ``json.loads`` alone accepts NaN, repeated keys (of which
it drops the first) and any size; the functions here do not.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hvd_ckpt.utils.schema import Wrong, first_error, shown

MAX_BYTES = 64 << 20  # largest JSON file, unless its owner says otherwise

T = TypeVar("T")

# ------------------------------------------------------------------------------------ JSON


def parse_json(schema: type[T], content: bytes, give: str, repair: str, limit: int = MAX_BYTES) -> T:
    """Parses and validates the content of a JSON file, in which tuples are lists.

    Args:
        schema: a :class:`Strict` model, or any other type that pydantic can validate.
        give: the way out if the content is not JSON, such as "give a file that Plan.save() wrote".
        repair: the way out if the content is damaged, such as "make the plan again".
        limit: the most bytes that it may have.

    Raises:
        Wrong: the content is too large, is not JSON, has a repeated key or does not match the schema.
    """
    # Parsed twice: this refuses repeated keys and constants such as NaN, which pydantic's own parser accepts.
    loads(content, give, repair, limit)
    try:
        return TypeAdapter(schema).validate_json(content)
    except ValidationError as error:
        raise Wrong(f"{first_error(error)}: {repair}") from None


def loads(content: bytes, give: str, repair: str, limit: int = MAX_BYTES) -> Any:
    """Parses the content of a JSON file; arguments are those of :func:`parse_json`.

    Raises:
        Wrong: the content is too large, not UTF-8, not valid JSON or too deep, or has a nonfinite number or a repeated key.
    """
    if len(content) > limit:
        raise Wrong(f"it is larger than {limit >> 20} MiB: {give}")
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Wrong(f"byte {error.start} is not UTF-8: {give}") from None
    except (ValueError, RecursionError) as error:
        raise Wrong(f"it is not valid JSON: {error}: {repair}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice in one place")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has the value {name}, and numbers must be finite")


def read_json(path: Path, give: str, repair: str) -> Any:
    """Reads and parses a JSON file; see :func:`loads`.

    Raises:
        Wrong: it is not a regular file, or its content is invalid.
        OSError: it cannot be read.
    """
    return loads(read_bytes(path, give), give, repair)


def read_bytes(path: Path, give: str) -> bytes:
    """The content of a file; only its first bytes if it is too large for :func:`loads`.

    Raises:
        Wrong: it is not a regular file.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise Wrong(f"it is a folder or a device: {give}")
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def dumps(value: Any) -> str:
    """Indented JSON of dicts, lists, texts and finite numbers, with lists of plain values in one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # Texts have escaped line ends, so each line end is between two values.
    flat = re.compile(r"\[\n\s+([^\[\]{}]*)\n\s*\]")
    return flat.sub(lambda match: "[" + re.sub(r"\n *", " ", match[1]) + "]", text) + "\n"


def write_text(text: str, path: Path) -> None:
    """Writes a text, as :func:`write_bytes`."""
    write_bytes([text.encode()], path)


def write_bytes(parts: Iterable[Any], path: Path) -> None:
    """Writes objects with bytes, one behind the other. The file is written completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    unnamed = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(unnamed, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            # Before the rename: else a power failure could leave the name with no content.
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    except BaseException:
        unnamed.unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------------ YAML


# Errors of PyYAML for a text that is not valid YAML, or whose tags do not match its values.
BROKEN = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)


class PlainLoader(yaml.SafeLoader):
    """YAML loader without aliases, in which keys are unique texts.

    A few lines of aliases can expand to more than a machine can hold, or to a list that contains itself. Of two equal keys, YAML
    would drop the first.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases are not allowed, write it out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            wrong = None
            if not isinstance(key, yaml.ScalarNode):
                wrong = "a name must be a text"
            elif key.value in seen:
                wrong = f"'{key.value}' is given twice"
            if wrong is not None:
                raise yaml.constructor.ConstructorError(None, None, wrong, key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


class PlainDumper(yaml.SafeDumper):
    """YAML dumper whose output :class:`PlainLoader` reads."""


for _class in (PlainLoader, PlainDumper):  # in YAML 1.1, 1e-4 is a text, since it has no dot
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
PlainLoader.add_constructor(  # a date is a text
    "tag:yaml.org,2002:timestamp",
    PlainLoader.construct_yaml_str,  # type: ignore[type-var]
)


def parsed(text: str) -> Any:
    """Parses a value of ``NAME=VALUE``: a number, true, false, a list in brackets, or a text.

    Raises:
        ValueError: the value is invalid.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except BROKEN:
        raise ValueError(
            f"'{text[:100]}' is not a value: give a number, true, false, [a, list] or a text"
        ) from None


def named(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """The values of a flag such as ``--model-option NAME=VALUE``, by name. Dashes in names become underscores.

    Raises:
        ValueError: a pair is not ``NAME=VALUE``, or its value is invalid. The message is one line that begins with the flag.
    """
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} '{pair}': give NAME=VALUE")
        try:
            values[name.replace("-", "_")] = parsed(text)
        except ValueError as error:
            raise ValueError(f"{flag} {name}: {error}") from None
    return values
