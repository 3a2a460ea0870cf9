"""``bash main.sh gpu``: all checks of a GPU machine, a line for each, and a report. Other arguments go to pytest."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import machine

from hvd_ckpt.app.compare.runner.report import Column, Report, table_of

COLUMNS = (
    Column("check", lambda row: row["name"]),
    Column("ranks", lambda row: row["ranks"] or None),
    Column("verdict", lambda row: row["verdict"]),
    Column("s", lambda row: row["seconds"], ".0f"),
    Column("found", lambda row: row["text"].replace("|", r"\|")),
)


class Checks:
    """Prints a line for each check as it ends, in place of pytest's, and keeps it for the report."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, str] = {}

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"  running {name_of(nodeid)}", flush=True)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found: dict[str, Any] = dict(report.user_properties)
        self.facts |= {name: " / ".join(text.splitlines()) for name, text in found.get("facts", {}).items()}
        text = str(found.get("found", ""))
        if report.failed:
            text = report.longreprtext.strip().split("\n")[0].removeprefix("Failed: ")
        elif report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        verdict = "FAILED" if report.failed else report.outcome
        print(f"{verdict:7} {report.duration:4.0f} s  {text}", flush=True)
        row = {"name": name_of(report.nodeid), "ranks": found.get("ranks", 0), "verdict": verdict}
        self.rows.append({**row, "seconds": report.duration, "text": text, "values": found.get("values", {})})

    def write(self, folder: Path, device: str) -> bool:
        """Writes ``report.md`` and ``results.json`` into the folder; returns whether nothing failed."""
        counts = Counter(row["verdict"] for row in self.rows)
        conclusion = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "FAILED", "skipped"))
        title = f"Checks on {'a GPU' if device == 'cuda' else 'the CPU: a dry run'}"
        tables, settings = [table_of(COLUMNS, self.rows)], {"device": device}
        Report(title, self.facts, tables, self.rows, settings=settings, conclusion=conclusion).save(folder)
        print(f"{conclusion}\nReport: {folder / 'report.md'}")
        return bool(self.rows) and not counts["FAILED"]


def name_of(nodeid: str) -> str:
    """The name of a check."""
    test, _, check = nodeid.partition("::")[2].partition("[")
    return check.rstrip("]") or test.removeprefix("test_")


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns 0, 1 if one failed, or 2 for a bad argument and on a machine without a GPU."""
    parser = argparse.ArgumentParser(prog="bash main.sh gpu", description=(__doc__ or "").replace("``", ""))
    folder: dict[str, Any] = {"metavar": "FOLDER", "type": Path}
    option = parser.add_argument
    option("--device", choices=("cuda", "cpu"), default="cuda", help="'cpu' is a dry run with tiny sizes")
    option("--minutes", type=float, default=25.0, help="after which the remaining checks are skipped")
    option("--offline", **folder, help="use the files that `python tests/gpu/offline.py` got")
    option("--output", **folder, help="for the report [default: runs/gpu-<time>]")
    options, others = parser.parse_known_args(arguments)
    if options.offline is not None and not options.offline.is_dir():
        fill = "`python tests/gpu/offline.py FOLDER` fills one"
        return _refuse(f"--offline: there is no folder {options.offline}; {fill}")
    if options.device == "cuda" and not machine.gpus():
        return _refuse(machine.NEEDED)
    output = (options.output or Path("runs", time.strftime("gpu-%Y%m%d-%H%M%S"))).resolve()
    output.mkdir(parents=True, exist_ok=True)
    words = ["--device", options.device, "--minutes", str(options.minutes), "--jobs", str(output / "jobs")]
    if options.offline is not None:
        words += ["--offline", str(options.offline.resolve())]
    checks = Checks()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    plain = ["-m", "gpu", "-o", "addopts=", "--import-mode=importlib"]
    plain += ["-p", "no:terminal", "-p", "no:cacheprovider"]
    # No fork server of the ordinary tests: a rank on a GPU is a process of its own.
    status = pytest.main([*plain, *words, *others, str(Path(__file__).parent)], plugins=[checks])
    if not checks.rows:
        return int(status) or 1
    return 0 if checks.write(output, options.device) else 1


if __name__ == "__main__":
    sys.exit(main())
