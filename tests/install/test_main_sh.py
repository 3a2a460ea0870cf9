"""Tests of main.sh with missing prerequisites: one clear sentence, exit status 1, and nothing half installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import add_program, run_command

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
TOOLS = ("bash", "dirname", "rm", "mkdir", "grep", "cat", "sed")


class Copy:
    """A copy of the repository's set-up, in a path with a space, with a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a copy"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.root.mkdir()
        shutil.copy(ROOT / "main.sh", self.root)
        for name in ("install", "hvd_ckpt/app/install"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add_program(self, name: str, script: str) -> None:
        add_program(self.bin / name, script, str(self.bin / "bash"))

    def add_python(self, *lacks: str, name: str = "python3") -> None:
        """The Python that runs the tests, without the modules in ``lacks`` and without the header if ``Python.h`` is among them."""
        changed = self.bin.parent / "changed"
        changed.mkdir()
        (changed / "sitecustomize.py").write_text(
            f"import sys, sysconfig\nsys.modules.update(dict.fromkeys({lacks!r}))\n"
            f"if 'Python.h' in {lacks!r}: sysconfig.get_path = lambda name: '/no/such/folder'\n"
        )
        real = getattr(sys, "_base_executable", sys.executable)
        self.add_program(name, f'PYTHONPATH="{changed}" exec "{real}" "$@"')

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.root), **NO_NETWORK, **environment}
        return run_command("bash", self.root / "main.sh", *arguments, cwd=self.bin, env=env)

    def installed(self) -> list[str]:
        """What pip was asked for, a line each time."""
        return (self.root / "installed").read_text().splitlines()

    def assert_refused(self, *words: str, asked: Sequence[str] = ("setup",), **environment: str) -> None:
        result = self.run(*asked, **environment)
        assert result.returncode == 1, result.stderr
        assert result.stderr.count("\nerror:") + result.stderr.startswith("error:") == 1, result.stderr
        for word in words:
            assert word in result.stderr.partition("error:")[2]
        assert "Traceback" not in result.stderr
        assert not (self.root / ".venv" / "bin").exists()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_python_or_a_compiler_that_is_missing(copy: Copy) -> None:
    copy.assert_refused("Python 3.10 or newer was not found", "PYTHON=")
    copy.add_program("python3", "exit 1")  # an old one
    copy.assert_refused("Python 3.10 or newer was not found")
    for name in ("/no/such/python", "python3"):
        copy.assert_refused(f"PYTHON={name} is not", PYTHON=name)
    copy.add_python("ensurepip", "Python.h", name="python3.12")  # the newer one is taken
    copy.assert_refused(
        "venv module", "python3-venv", "C++ compiler was not found", "g++", "Python.h", "python3-dev"
    )


def test_a_compiler_that_does_not_work_and_a_folder_without_wheels(copy: Copy) -> None:
    copy.add_python()
    copy.assert_refused("'none' holds no wheels", "tests/gpu/offline.py", asked=("gpu", "--offline", "none"))
    copy.add_program("c++", "echo 'c++: fatal error: no input today' >&2; exit 1")
    copy.assert_refused("c++ does not compile", "no input today")
    copy.assert_refused("CXX=/no/such/compiler", "No such file", CXX="/no/such/compiler")


def test_a_set_up_that_is_running_is_left_alone_and_an_interrupted_one_starts_over(copy: Copy) -> None:
    venv = copy.root / ".venv"
    (venv / "lib").mkdir(parents=True)
    (venv / ".setting-up").write_text(f"{os.getpid()}\n")
    copy.assert_refused(f"another set-up of {copy.root} is running (process {os.getpid()})")
    assert (venv / ".setting-up").exists()
    (venv / ".setting-up").write_text("4194305\n")  # above the largest process id Linux gives
    result = copy.run("setup")
    assert "was interrupted: starting over" in result.stderr
    assert "Python 3.10 or newer was not found" in result.stderr
    assert not venv.exists()


def test_help_needs_nothing(copy: Copy) -> None:
    result = copy.run("--help")
    assert result.returncode == 0
    for command in ("setup", "test", "compare", "doctor", "NP=4"):
        assert command in result.stdout
    assert not (copy.root / ".venv").exists()


@pytest.fixture
def environment(copy: Copy) -> Copy:
    """A copy whose .venv is there and whose Horovod cannot be built."""
    venv = copy.root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "activate").write_text(str(venv))
    python = f"""case "$*" in
        *build_horovod\\ --print-key*) echo key;;
        *tests/gpu/run.py*) echo "checks ${{*:2}}";;
        *build_horovod*) [[ ! -e "{copy.root}/builds" ]] || exit 0; echo "error: no Horovod today" >&2; exit 1;;
        *pip\\ install*)
            [[ ! -e "{copy.root}/offline" ]] || {{ echo "no network today"; exit 1; }}
            echo "$*" >>"{copy.root}/installed";;
        *) exec "{sys.executable}" "$@";;
    esac"""
    for name, script in (("python", python), ("hvd-ckpt", 'echo "hvd-ckpt $*"')):
        add_program(venv / "bin" / name, script, str(copy.bin / "bash"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, copy.root)
    return copy


def test_a_failed_network_keeps_what_is_there(environment: Copy) -> None:
    packages = environment.root / ".venv" / "lib" / "python3.11" / "site-packages"
    half, whole = packages / "half.dist-info", packages / "whole.dist-info"
    half.mkdir(parents=True)
    whole.mkdir()
    (whole / "RECORD").touch()
    (environment.root / "offline").touch()
    for _ in range(2):
        result = environment.run("setup")
        assert result.returncode == 1
        message, said, *error = result.stderr.splitlines()
        assert "GB" in message and "PIP_EXTRA_INDEX_URL" in message  # before pip starts
        assert said == "no network today" and len(error) == 1 and error[0].startswith("error: ")
        assert whole.exists() and not half.exists(), "pip takes a package without a RECORD for installed"


def test_a_failed_build_leaves_a_doctor(environment: Copy) -> None:
    result = environment.run("compare")
    assert result.returncode == 1
    assert "no Horovod today" in result.stderr
    assert ".venv/bin/hvd-ckpt doctor" in result.stderr.splitlines()[-1]
    requirements, package = environment.installed()
    assert "requirements.txt" in requirements and "--editable" in package
    assert environment.run("doctor").stdout == "hvd-ckpt doctor\n"
    assert "interrupted" not in environment.run("setup").stderr


def test_the_main_job_is_the_quick_comparison_and_only_tests_get_what_they_need(environment: Copy) -> None:
    (environment.root / "builds").touch()
    assert environment.run().stdout == "hvd-ckpt compare --quick\n"
    assert environment.run("compare", "--np", "4").stdout == "hvd-ckpt compare --np 4\n"
    assert not [line for line in environment.installed() if "requirements-tests" in line]
    environment.run("setup")
    environment.run("test", "--help")
    (line,) = (line for line in environment.installed() if "requirements-tests" in line)
    # With the versions that are there.
    assert f"-c {environment.root / '.venv' / '.stamps' / 'requirements.txt'}" in line


def test_a_torch_of_the_users_own_is_kept(environment: Copy) -> None:
    """The pin is a tested version, not the only one; one that cannot be had is not remembered."""
    list_, offline = environment.root / ".venv" / ".stamps" / "requirements.txt", environment.root / "offline"

    def set_up(**variables: str) -> str:
        environment.run("setup", **variables)
        (line,) = (line for line in list_.read_text().splitlines() if line.startswith("torch=="))
        return line

    pinned = set_up()
    offline.touch()
    assert set_up(TORCH="9.9") == "torch==9.9"
    offline.unlink()
    assert set_up() == pinned
    assert set_up(TORCH="2.14.1+cpu") == "torch==2.14.1+cpu"
    assert set_up() == "torch==2.14.1+cpu"
    installed = environment.installed()
    assert sum(f"-r {list_}" in line for line in installed) == 2, "the second time there is nothing to do"


def test_wheels_of_a_folder_are_installed_once_without_an_index(environment: Copy) -> None:
    packages = environment.root / ".venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    wheels = environment.root / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").touch()
    for _ in range(2):
        result = environment.run("gpu", "--offline", str(wheels), "--device", "cpu", PYTHON=sys.executable)
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"checks --offline {wheels} --device cpu\n"
    installed = environment.installed()
    assert [line for line in installed if "a.whl" in line and "--no-index" in line] == installed[:1]
    assert len(installed) == 2 and "requirements" not in installed[1]  # then this package
    assert (packages / "machine.pth").read_text().splitlines()
