"""The suites: each module has one, under its own name; its docstring is the help of the command."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.suite import Suite


def names() -> list[str]:
    """The names of all suites."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    suite: Suite = getattr(import_module(f"{__name__}.{name}"), name)
    return suite
