"""Values as people write them in YAML files and after flags, read without executing or unfolding anything."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

# What PyYAML raises for a text that is not valid YAML, or whose tags do not fit its values.
BROKEN = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
)


class PlainLoader(yaml.SafeLoader):
    """Without aliases: a few lines of them unfold to more than a machine can hold, or to a list that contains itself."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases are not allowed, write it out", event.start_mark
            )
        return super().compose_node(parent, index)


class PlainDumper(yaml.SafeDumper):
    """Writes what :class:`PlainLoader` reads back."""


for _class in (PlainLoader, PlainDumper):  # YAML 1.1 takes 1e-4 for a text, since it has no dot
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
    """A value as it is written after ``NAME=``: a number, true, false, a list in brackets, or text.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except BROKEN:
        raise ValueError(
            f"'{text[:100]}' is not a value: give a number, true, false, [a, list] or a text"
        ) from None


def named(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """The values of a flag such as ``--model-option NAME=VALUE``, by name; dashes in names are underscores.

    Raises:
        ValueError: one of them is not ``NAME=VALUE``, or its value is invalid; one line that begins with the flag.
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
