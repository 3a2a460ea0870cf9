"""main.sh where something is missing: one clear sentence, exit status 1, nothing left half done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "rm", "mkdir", "grep", "cat", "sed")


class Copy:
    """A copy of the repository's set-up, in a path with a space, with a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a copy"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.root.mkdir()
        shutil.copy(ROOT / "main.sh", self.root)
        shutil.copytree(ROOT / "install", self.root / "install", ignore=shutil.ignore_patterns("__pycache__"))
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)

    def add_program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{self.bin / 'bash'}\n{script}\n")
        path.chmod(0o755)

    def add_python(self, lacks: str = "nothing at all") -> None:
        """The Python that runs the tests, except that a question about ``lacks`` is answered with no."""
        real = getattr(sys, "_base_executable", sys.executable)
        self.add_program("python3", f'case "$*" in *"{lacks}"*) exit 1;; esac\nexec "{real}" "$@"')

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "main.sh"), *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.root)} | environment,
            cwd=self.bin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def assert_refused(self, result: subprocess.CompletedProcess[str], *words: str) -> None:
        errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert result.returncode == 1, result.stderr
        assert len(errors) == 1, result.stderr
        for word in words:
            assert word in errors[0]
        assert "Traceback" not in result.stderr
        assert not (self.root / ".venv" / "bin").exists()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_no_python(copy: Copy) -> None:
    copy.assert_refused(copy.run("setup"), "Python 3.10 or newer was not found", "PYTHON=")


def test_python_too_old(copy: Copy) -> None:
    copy.add_python(lacks="version_info")
    copy.assert_refused(copy.run("setup"), "Python 3.10 or newer was not found")


def test_a_newer_python_beside_an_old_one_is_taken(copy: Copy) -> None:
    copy.add_python(lacks="ensurepip")
    (copy.bin / "python3").rename(copy.bin / "python3.12")
    copy.add_program("python3", "exit 1")
    copy.assert_refused(copy.run("setup"), f"{copy.bin / 'python3.12'} lacks the venv module")


@pytest.mark.parametrize("name", ["/no/such/python", "old"])
def test_the_python_that_was_asked_for_is_not_usable(copy: Copy, name: str) -> None:
    copy.add_python()
    copy.add_program("old", "exit 1")
    copy.assert_refused(copy.run("setup", PYTHON=name), f"PYTHON={name} is not")


def test_no_venv_module(copy: Copy) -> None:
    copy.add_python(lacks="ensurepip")
    copy.assert_refused(copy.run("setup"), "venv module with ensurepip", "python3-venv")


def test_no_compiler(copy: Copy) -> None:
    copy.add_python()
    copy.assert_refused(copy.run("setup"), "C++ compiler was not found", "g++")


def test_no_python_headers(copy: Copy) -> None:
    copy.add_python(lacks="Python.h")
    copy.add_program("c++", "exit 0")
    copy.assert_refused(copy.run("setup"), "Python.h", "python3-dev")


def test_an_interrupted_set_up_starts_over(copy: Copy) -> None:
    venv = copy.root / ".venv"
    (venv / "lib").mkdir(parents=True)
    (venv / ".setting-up").write_text("4194305\n")  # above the largest process id Linux gives
    result = copy.run("setup")
    assert "was interrupted: starting over" in result.stderr
    copy.assert_refused(result, "Python 3.10 or newer was not found")
    assert not venv.exists()


def test_a_set_up_that_is_running_is_left_alone(copy: Copy) -> None:
    venv = copy.root / ".venv"
    venv.mkdir()
    (venv / ".setting-up").write_text(f"{os.getpid()}\n")
    copy.assert_refused(
        copy.run("setup"), f"another set-up of {copy.root} is running (process {os.getpid()})"
    )
    assert (venv / ".setting-up").exists()


def test_help_needs_nothing(copy: Copy) -> None:
    result = copy.run("--help")
    assert result.returncode == 0
    for command in ("setup", "test", "compare", "doctor", "NP=4"):
        assert command in result.stdout
    assert not (copy.root / ".venv").exists()
