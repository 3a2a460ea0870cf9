"""Kinds of test files, by markers in their text: ``tests/run.py`` chooses files by them, and ``tests/conftest.py`` collects."""

from __future__ import annotations

import re

SELECTIONS = {"hosts": "hosts", "launch": "launch and not hosts", "process": "not launch"}
"""The ``-m`` of pytest for each kind but ``ranks``, which a launcher selects."""


def kind_of(text: str) -> str:
    """The kind of the tests in a file."""
    return next((kind for kind in ("hosts", "launch", "ranks") if f"pytest.mark.{kind}" in text), "process")


def sizes_of(text: str) -> set[int]:
    """The numbers of ranks, over any controller, that the tests in a file name."""
    tuples = re.findall(r"(?:gloo|mpi)=\(([\d, ]+)\)", text)
    return {int(number) for numbers in tuples for number in re.findall(r"\d+", numbers)}
