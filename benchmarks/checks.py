"""Suites whose runs are checks in a folder of ``tests``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1] / "tests"


def import_checks(folder: str) -> ModuleType:
    """The program of a suite whose runs are in a folder of ``tests``."""
    # At the end, so that no module there hides an installed one.
    sys.path.append(str(TESTS))
    return import_module(f"{folder}.run")
