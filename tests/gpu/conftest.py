"""The checks of a GPU machine are tests: on tiny sizes on the CPU, unless ``--device cuda`` is given.

    bash main.sh gpu                                            all of them on this machine's GPUs, with a report
    python -m pytest -m gpu tests/gpu --device cuda -k stages   some of them

A check runs in processes of its own with a time limit, so that one that hangs is one failure. What it finds, and the facts of the
machine, are properties of its test, from which :mod:`gpu.run` makes the report.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from gpu.session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("checks of a GPU machine")
    group.addoption("--device", choices=("cuda", "cpu"), default="cpu", help="where checks run")
    group.addoption(
        "--minutes", type=float, default=25.0, help="after which the remaining checks are skipped"
    )
    group.addoption("--offline", type=Path, help="folder with Horovod's source archive")
    group.addoption("--jobs", type=Path, help="folder for the logs of checks")


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """This machine, and what was found on it so far."""
    option = request.config.getoption
    jobs = option("--jobs", default=None) or tmp_path_factory.mktemp("jobs")
    end = time.monotonic() + 60 * option("--minutes", default=25.0)
    return Session(option("--device", default="cpu"), jobs, end, option("--offline", default=None))
