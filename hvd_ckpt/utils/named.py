"""Functions and classes of the user's own modules, given as ``module:attribute``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def is_named(name: str) -> bool:
    """Whether a name has the form ``module:attribute`` and is not that of a folder."""
    return ":" in name and not os.path.isdir(name)


def import_named(what: str, name: str) -> Callable[..., Any]:
    """Imports the function or class ``module:attribute``, also from modules in the current folder.

    Args:
        what: its role, for errors, such as ``"model"``.

    Raises:
        ValueError: it cannot be imported, or is not a function or class.
    """
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise ValueError(f"no {what} '{name}': write {module.removesuffix('.py')}:{attribute}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # At the end, so that no module of the current folder hides an installed one.
        sys.path.append(os.getcwd())
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no {what} '{name}': {error}") from None
    if not callable(value):
        raise ValueError(f"'{name}' is a {type(value).__name__}, not a function")
    function: Callable[..., Any] = value
    return function
