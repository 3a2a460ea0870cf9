"""Engines beside those of the comparison: every module here has a dict ``ENGINES`` of names and classes."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from hvd_ckpt.app.compare.runner import engines as shared
from hvd_ckpt.app.compare.runner.engine import Engine


@cache
def engines() -> dict[str, type[Engine]]:
    """All engines by name."""
    found = dict(shared.ENGINES)
    for module in pkgutil.iter_modules(__path__):
        found |= import_module(f"{__name__}.{module.name}").ENGINES
    return found


def find_engine(name: str) -> type[Engine]:
    """The engine of that name, or the class that ``module:Class`` names.

    Raises:
        ValueError: the name is unknown, or ``module:Class`` is not an engine.
    """
    return shared.find_engine(name, engines())
