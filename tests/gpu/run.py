"""``bash main.sh gpu``: all checks of a GPU machine, a line for each, and a report. Other arguments go to pytest."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import machine, report


class _Lines:
    """Prints a line for each check as it ends, in place of pytest's."""

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = nodeid.partition("::")[2]
        print(f"  running {name.partition('[')[2].rstrip(']') or name.removeprefix('test_')}", flush=True)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        found = str(dict(report.user_properties).get("found", ""))
        if report.failed:
            found = report.longreprtext.strip().split("\n")[0].removeprefix("Failed: ")
        elif report.skipped and isinstance(report.longrepr, tuple):
            found = report.longrepr[2].removeprefix("Skipped: ")
        verdict = "FAILED" if report.failed else report.outcome
        print(f"{verdict:7} {report.duration:4.0f} s  {found}", flush=True)


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns 0, 1 if one failed, or 2 for a bad argument and on a machine without a GPU."""
    parser = argparse.ArgumentParser(prog="bash main.sh gpu", description=(__doc__ or "").replace("``", ""))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="'cpu' is a dry run with tiny sizes"
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="after which the remaining checks are skipped"
    )
    parser.add_argument(
        "--offline", metavar="FOLDER", type=Path, help="use the files that `python tests/gpu/offline.py` got"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", type=Path, help="for the report [default: runs/gpu-<time>]"
    )
    options, others = parser.parse_known_args(arguments)
    if options.offline is not None and not options.offline.is_dir():
        return _refuse(
            f"--offline: there is no folder {options.offline}; `python tests/gpu/offline.py FOLDER` fills one"
        )
    if options.device == "cuda" and not machine.gpus():
        return _refuse(machine.NEEDED)
    folder = (options.output or Path("runs", time.strftime("gpu-%Y%m%d-%H%M%S"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--device", options.device, "--minutes", str(options.minutes), "--jobs", str(folder / "jobs")]
    if options.offline is not None:
        words += ["--offline", str(options.offline.resolve())]
    junit = folder / "junit.xml"
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    plain = ["-m", "gpu", "-o", "addopts=", "--import-mode=importlib", f"--junitxml={junit}"]
    plain += ["-p", "no:terminal", "-p", "no:cacheprovider"]
    # No fork server of the ordinary tests: a rank on a GPU is a process of its own.
    status = pytest.main([*plain, *words, *others, str(Path(__file__).parent)], plugins=[_Lines()])
    if not junit.exists():
        return int(status) or 1
    return 0 if report.write(junit, folder, options.device) else 1


if __name__ == "__main__":
    sys.exit(main())
