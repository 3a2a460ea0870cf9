"""Planted faults: each is put into a copy of the repository, where a test must fail.

    python tests/planted/run.py                               all of them
    python tests/planted/run.py recompute "damaged snapshot"  those of some rooms, or with some words

The files beside this one have those of a room each. A line after ``$`` is the command whose tests find the faults that follow; a
fault is a sentence that says what is wrong, a file, and lines as in a patch. What is taken out must be there once: lines around
it say where, if it is there more often. Prints the faults that nothing finds, and ends with status 1 if there are any.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
from controllers import HOROVODRUN
from fork_server import fork_server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "site", "runs", "*.egg-info")
SECONDS = 300.0


class Fault(NamedTuple):
    """A fault, and the command that finds it; ``right`` are the lines of ``file`` in whose place it has ``wrong``."""

    what: str
    room: str
    command: str
    file: str
    right: str
    wrong: str


def faults() -> Iterator[Fault]:
    """All of them."""
    for path in sorted(HERE.glob("*.patch")):
        command = ""
        for paragraph in path.read_text().strip().split("\n\n"):
            what, *rest = paragraph.splitlines()
            if what.startswith("$ "):
                command = what[2:]
                continue
            file, *lines = rest
            right, wrong = (
                "".join(f"{line[1:]}\n" for line in lines if line[0] in f" {sign}") for sign in "-+"
            )
            yield Fault(what, path.stem, command, file, right, wrong)


def planted(fault: Fault, text: str) -> str | None:
    """The text of a file with a fault, or None if that has no place there."""
    text, right = f"\n{text}", f"\n{fault.right}"
    return text.replace(right, f"\n{fault.wrong}")[1:] if text.count(right) == 1 else None


def outcome(fault: Fault, copy: Path, environment: dict[str, str]) -> str:
    """``found``, or why a fault was not."""
    file = copy / fault.file
    text = file.read_text()
    if (wrong := planted(fault, text)) is None:
        return f"its lines are not in {fault.file}, or more than once"
    words = shlex.split(fault.command.replace("horovodrun", shlex.join(HOROVODRUN), 1))
    words = [sys.executable if word == "python" else word for word in words]
    place: Any = {"cwd": copy, "env": environment}
    _write(file, wrong)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, **place)
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {SECONDS:g} seconds"
    finally:
        _write(file, text)
    if done.returncode and re.search(r"^FAILED |\n\S+::test_\S+\n|\b\d+ failed", done.stdout + done.stderr):
        return "found"
    said = (done.stdout + done.stderr).strip().splitlines()
    return f"nothing finds it: {said[-1] if said else 'no output'}"


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    # Python takes byte code for that of a file of the same size and second.
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def main(names: Sequence[str]) -> int:
    missed, words = 0, names or [""]
    chosen = [each for each in faults() if any(word == each.room or word in each.what for word in words)]
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_planted_") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=LEFT_OUT))
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        with fork_server(environment, ours=False) as variables:
            for fault in chosen:
                said = outcome(fault, copy, {**environment, **variables})
                missed += said != "found"
                print(f"{fault.room}: {fault.what} {said}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted faults were found")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
