"""Kinds of test files, by markers in their text: ``tests/run.py`` chooses files by them, and ``tests/conftest.py`` collects."""

from __future__ import annotations

SELECTIONS = {"hosts": "hosts", "launch": "launch and not hosts", "process": "not launch"}
"""The ``-m`` of pytest for each kind but ``ranks``, which a launcher selects."""


def kind_of(text: str) -> str:
    """The kind of the tests in a file."""
    return next((kind for kind in ("hosts", "launch", "ranks") if f"pytest.mark.{kind}" in text), "process")
