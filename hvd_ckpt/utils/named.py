"""Functions and classes of a user's own modules, named as ``module:attribute``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def is_named(name: str) -> bool:
    """Whether a name is one of ``module:attribute``, and not of a folder."""
    return ":" in name and not os.path.isdir(name)


def import_named(what: str, name: str) -> Callable[..., Any]:
    """The function or class that ``module:attribute`` names; modules in the current folder are found, too.

    Args:
        what: it is to be, for errors: ``"model"``.

    Raises:
        ValueError: it cannot be imported, or is not a function or class.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no {what} '{name}': {error}") from None
    if not callable(value):
        raise ValueError(f"'{name}' is a {type(value).__name__}, not a function")
    function: Callable[..., Any] = value
    return function
