"""Planted faults: each patch beside this file puts one into a copy of the repository, where a test must fail.

    python tests/planted/run.py                        all of them
    python tests/planted/run.py recompute snapshots    those of some rooms, or some patches

A patch begins with a sentence that says what is wrong, and the command whose tests find it. Prints the faults that nothing
finds, and ends with status 1 if there are any.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
from controllers import HOROVODRUN
from fork_server import fork_server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "site", "runs", "*.egg-info")
SECONDS = 300.0


def chosen(names: Sequence[str]) -> Iterator[Path]:
    for name in names or [""]:
        place = HERE / name
        yield from sorted(place.rglob("*.patch")) if place.is_dir() else [place.with_suffix(".patch")]


def outcome(patch: Path, copy: Path, environment: dict[str, str]) -> str:
    """``found``, or why a fault was not."""
    text = patch.read_text()
    command = text.splitlines()[1]
    apply = functools.partial(subprocess.run, input=text, cwd=copy, capture_output=True, text=True)
    done = apply(["git", "apply"])
    if done.returncode:
        return f"the patch does not apply: {done.stderr.strip().splitlines()[-1]}"
    try:
        words = shlex.split(command.replace("horovodrun", shlex.join(HOROVODRUN), 1))
        words = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(
            words, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {SECONDS:g} seconds"
    finally:
        apply(["git", "apply", "--reverse"], check=True)
    if done.returncode and re.search(r"^FAILED |\n\S+::test_\S+\n|\b\d+ failed", done.stdout + done.stderr):
        return "found"
    said = (done.stdout + done.stderr).strip().splitlines()
    return f"nothing finds it: {said[-1] if said else 'no output'}"


def main(names: Sequence[str]) -> int:
    missed = 0
    patches = list(chosen(names))
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_planted_") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=LEFT_OUT))
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        with fork_server(environment, ours=False) as variables:
            for patch in patches:
                said = outcome(patch, copy, {**environment, **variables})
                missed += said != "found"
                print(f"{patch.relative_to(HERE).with_suffix('')}: {said}", flush=True)
    print(f"{len(patches) - missed} of {len(patches)} planted faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
