"""Warnings about a run, such as a snapshot that cannot be written: one line of a log.

Python prints a warning with the line of code that gives it, which is right for a mistake in code. Here that line would be one of
this library, and say nothing.
"""

from __future__ import annotations

import warnings


class RunWarning(UserWarning):
    """A warning about a run, not about a line of code."""


def warn(text: str) -> None:
    """Warns of something in the run."""
    warnings.warn(text, RunWarning, stacklevel=2)


def _format(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, RunWarning):
        return f"Warning: {message}\n"
    return _pythons(message, category, filename, lineno, line)


_pythons, warnings.formatwarning = warnings.formatwarning, _format
