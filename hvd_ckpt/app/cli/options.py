"""Options of a command: one for each field of a pydantic model, which validates their values.

An option has the name of its field, with dashes; its help is the description and the default. Its text is the value of a field that
takes text, and is otherwise read as a number, true, false or a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.training.field_types import Options, is_text
from hvd_ckpt.utils.plain_data import named, parsed
from hvd_ckpt.utils.schema import first_error

Settings = TypeVar("Settings", bound=BaseModel)


def options_of(settings: type[BaseModel]) -> list[click.Parameter]:
    """The options of a command with these settings."""
    return [_option(name, field) for name, field in settings.model_fields.items()]


def _option(name: str, field: FieldInfo) -> click.Option:
    extra: Any = field.json_schema_extra or {}
    flag, help = extra.get("flag", name).replace("_", "-"), field.description or ""
    if field.annotation is bool:
        help += f"  [default: {flag}]" if field.default else ""
        return click.Option([f"--{flag}/--no-{flag}", name], default=None, help=help)
    # A mapping is given by one option for each of its entries, so the option is the singular: --model-option layers=2.
    if field.annotation == Options:
        return click.Option([f"--{flag[:-1]}", name], multiple=True, metavar="NAME=VALUE", help=help)
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    if default is not None and not field.is_required() and str(default):
        quick = f"; with --quick {extra['quick']}" if "quick" in extra else ""
        help += f"  [default: {default}{quick}]"
    return click.Option(
        [f"--{flag}", name], default=None, metavar="VALUE", help=help, envvar=extra.get("envvar")
    )


def settings_of(settings: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings with the options that are given; a BadArgument if one is invalid."""
    try:
        return settings(**values_of(settings, given))
    except ValidationError as error:
        raise BadArgument(f"--{first_error(error)}") from None
    except ValueError as error:
        raise BadArgument(str(error)) from None


def values_of(settings: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that are given, not validated yet.

    Raises:
        ValueError: a text is not a value, or not ``NAME=VALUE``. The message begins with the option.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        flag, annotation = f"--{name.replace('_', '-')}", settings.model_fields[name].annotation
        if annotation == Options:
            if value:
                values[name] = named(flag.removesuffix("s"), value)
        elif isinstance(value, str) and not is_text(annotation):
            try:
                values[name] = parsed(value)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from None
        elif value is not None:
            values[name] = value
    return values
