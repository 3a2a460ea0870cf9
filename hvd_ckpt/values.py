"""Values as people write them in files and after flags: YAML's, with the numbers that YAML takes for texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

__all__ = ["BROKEN", "PlainLoader", "converted", "named", "parsed"]

# What PyYAML raises for a text that is no YAML, or whose tags say what its values are not.
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
    """Without aliases: a few lines of them unfold to more than a machine can hold, or to a list that is within itself."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases are not taken, write it out", event.start_mark
            )
        return super().compose_node(parent, index)


PlainLoader.add_constructor(  # a date is a text
    "tag:yaml.org,2002:timestamp",
    PlainLoader.construct_yaml_str,  # type: ignore[type-var]
)


def parsed(text: str) -> Any:
    """A value as it is written after ``NAME=``: a number, true, false, a list in brackets, or text.

    Raises:
        ValueError: it is none of them.
    """
    try:
        value = yaml.load(text, Loader=PlainLoader)
    except BROKEN:
        raise ValueError(
            f"'{text[:100]}' is no value: give a number, true, false, [a, list] or a text"
        ) from None
    return converted(value)


def converted(value: Any) -> Any:
    """What YAML has read, with numbers for texts that are numbers: YAML 1.1 takes 1e-4 for a text, since it has no dot."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [converted(one) for one in value]
    if isinstance(value, dict):
        return {name: converted(one) for name, one in value.items()}
    return value


def named(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """The values that a flag such as ``--model-option NAME=VALUE`` was given with, by name; dashes in names are underscores.

    Raises:
        ValueError: one of them is no ``NAME=VALUE``, or its value is none; one line that begins with the flag.
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
