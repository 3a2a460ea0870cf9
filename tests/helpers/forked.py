"""Code that needs a fresh process: all cases of a file are forked from one, which imports what takes long once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.processes.launchers import RANK_VARIABLES

BESIDE = 3  # cases


@dataclass(frozen=True)
class Case:
    """Code, and environment variables beside those of this process. It can be given arguments, in ``sys.argv[1:]``."""

    code: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def run_forked(imports: str, cases: Mapping[str, Case], seconds: float = 200) -> dict[str, Result]:
    """Runs each case after ``imports``, as ranks of no launcher; some beside each other, as many spend their time waiting."""
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_tests_") as folder:
        job = [[case.code, {**clean, **case.environment}, case.arguments] for case in cases.values()]
        done = subprocess.run(
            [sys.executable, __file__, folder, imports],
            input=json.dumps(job),
            env=clean,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        statuses = json.loads(done.stdout.splitlines()[-1])
        texts = [
            [Path(folder, f"{number}.{end}").read_text() for end in (1, 2)] for number in range(len(job))
        ]
    return {name: Result(status, *text) for name, status, text in zip(cases, statuses, texts)}


def _main(folder: str, imports: str) -> None:
    names: dict[str, object] = {}
    exec(imports, names)
    running: dict[int, int] = {}
    statuses: dict[int, int] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        statuses[running.pop(child)] = os.waitstatus_to_exitcode(status)

    for number, (code, environment, arguments) in enumerate(json.load(sys.stdin)):
        if len(running) == BESIDE:
            wait_for_one()
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[1:] = arguments
            status = 0
            try:
                exec(code, {**names, "__name__": "__main__"})
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        running[child] = number
    while running:
        wait_for_one()
    print(json.dumps([statuses[number] for number in sorted(statuses)]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
