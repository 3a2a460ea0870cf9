"""Tests of run_docker_checkpoint_sequential.sh: its calls of Docker, and its message without Docker.

Building the image takes minutes, so a program called docker stands in for the real one and notes its arguments.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import add_program, run_command

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = r"""
printf '%s\0' "$@" >"$CALLS/$(ls "$CALLS" | wc -l)"
case "$1" in
    version) echo "$DAEMON"; exit "${VERSION_STATUS:-0}" ;;
    info) echo "$SECURITY" ;;
    build) echo "Step 1/1"; exit "${BUILD_STATUS:-0}" ;;
    run) echo "the command's output"; exit "${RUN_STATUS:-0}" ;;
esac
"""


class Desk:
    """A folder to start the script from, with a stand-in for docker first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.bin = (folder / name for name in ("a folder", "calls", "bin"))
        for path in (self.folder, self.calls, self.bin):
            path.mkdir()
        add_program(self.bin / "docker", STAND_IN, "/usr/bin/env bash")
        self.environment = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "DAEMON": "20.10",
            "SECURITY": "[name=seccomp,profile=default]",
        }

    def run(self, *arguments: str, streams: dict[str, Any] | None = None, **environment: str) -> Any:
        words = "bash", ROOT / "run_docker_checkpoint_sequential.sh", *arguments
        return run_command(*words, cwd=self.folder, env=self.environment | environment, **(streams or {}))

    def asked(self, command: str) -> list[list[str]]:
        """The arguments of every ``docker COMMAND``, in order."""
        files = sorted(self.calls.iterdir(), key=lambda path: int(path.name))
        calls = [path.read_text().split("\0")[:-1] for path in files]
        return [call[1:] for call in calls if call[0] == command]

    def assert_refused(self, word: str, **environment: str) -> None:
        result = self.run(**environment)
        assert result.returncode == 1
        (error,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert word in error


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def value_after(arguments: list[str], option: str) -> str:
    assert option in arguments, arguments
    return arguments[arguments.index(option) + 1]


def test_builds_then_runs_the_command_with_its_arguments(desk: Desk) -> None:
    result = desk.run("test", "-k", "two words", "--x=*", RUN_STATUS="137")
    assert result.returncode == 137, result.stderr  # the command's
    assert result.stdout == "the command's output\n"  # the build speaks on standard error
    assert "Step 1/1" in result.stderr
    (build,), (run,) = desk.asked("build"), desk.asked("run")
    assert build == ["--tag", "hvd_ckpt", "--build-arg", "BASE_IMAGE=debian:bookworm-slim", str(ROOT)]
    assert run[run.index("hvd_ckpt") :] == ["hvd_ckpt", "test", "-k", "two words", "--x=*"]
    # The container is the caller's, and sees the folder of results only.
    runs = desk.folder / "runs"
    assert runs.is_dir() and runs.stat().st_uid == os.getuid()
    assert value_after(run, "--mount") == f"type=bind,source={runs},target={runs}"
    assert value_after(run, "--workdir") == str(desk.folder)
    assert value_after(run, "--user") == f"{os.getuid()}:{os.getgid()}"
    assert {"--rm", "--ipc=host"} <= set(run)
    assert not {"--tty", "--interactive", "--gpus", "--env"} & set(run)
    assert desk.run().returncode == 0
    assert desk.asked("run")[1][-1] == "hvd_ckpt"  # without arguments, the main job


def test_daemons_that_map_users(desk: Desk) -> None:
    mine = f"--user {os.getuid()}:{os.getgid()} --userns=host"
    for number, (kind, flags) in enumerate([("rootless", "--user 0:0"), ("userns", mine)]):
        assert desk.run(SECURITY=f"[name=seccomp name={kind}]").returncode == 0
        assert flags in " ".join(desk.asked("run")[number])


def test_gpus_are_for_a_cuda_image(desk: Desk) -> None:
    base = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
    for environment in ({}, {"DOCKER_GPUS": "device=1"}, {"DOCKER_GPUS": ""}):
        desk.run(BASE_IMAGE=base, **environment)
    desk.run(BASE_IMAGE="debian:trixie-slim")
    builds, runs = desk.asked("build"), desk.asked("run")
    images = [(value_after(build, "--build-arg"), value_after(build, "--tag")) for build in builds[2:]]
    assert images == [(f"BASE_IMAGE={base}", "hvd_ckpt:cuda"), ("BASE_IMAGE=debian:trixie-slim", "hvd_ckpt")]
    nccl = ["HOROVOD_GPU_OPERATIONS=NCCL" in build for build in builds]
    assert nccl == [True, True, True, False]  # a build sees no GPU
    assert [value_after(run, "--gpus") for run in runs[:2]] == ["all", "device=1"]
    assert "--gpus" not in runs[2] and "--gpus" not in runs[3]


def test_flags_settings_and_a_terminal_are_passed_to_docker(desk: Desk) -> None:
    here, there = pty.openpty()
    streams = {"stdin": there, "stdout": there, "stderr": subprocess.DEVNULL}
    flags = {
        "DOCKER_BUILD_FLAGS": "--network=host --build-arg A=*",
        "DOCKER_RUN_FLAGS": "--network=host --volume /data:/data",
    }
    result = desk.run(
        "compare", streams=streams, DOCKER_IMAGE="mine:1", NP="4", HOROVOD_CYCLE_TIME="2", **flags
    )
    os.close(here)
    os.close(there)
    assert result.returncode == 0
    (build,), (run,) = desk.asked("build"), desk.asked("run")
    assert build[-4:] == ["--network=host", "--build-arg", "A=*", str(ROOT)]
    assert run[-5:] == ["--network=host", "--volume", "/data:/data", "mine:1", "compare"]
    named = [run[i + 1] for i, word in enumerate(run) if word == "--env"]
    assert sorted(named) == ["HOROVOD_CYCLE_TIME", "NP"]  # Docker takes the values from the environment
    assert {"--tty", "--interactive"} <= set(run)


def test_what_goes_wrong_is_one_line(desk: Desk) -> None:
    desk.assert_refused("(Cannot connect to it.)", VERSION_STATUS="1", DAEMON="\nCannot connect to it.")
    assert not (desk.folder / "runs").exists()
    desk.assert_refused("hvd_ckpt could not be built on debian:bookworm-slim", BUILD_STATUS="100")
    assert desk.asked("run") == []
    (desk.folder / "runs").rmdir()
    (desk.folder / "runs").write_text("a file")
    desk.assert_refused(f"results cannot be written to {desk.folder / 'runs'}")
    assert len(desk.asked("build")) == 1
    (desk.bin / "docker").unlink()
    for tool in ("bash", "dirname", "id"):
        (desk.bin / tool).symlink_to(str(shutil.which(tool)))
    desk.assert_refused("docker was not found", PATH=str(desk.bin))


def test_help_needs_no_docker(desk: Desk) -> None:
    result = desk.run("--help")
    assert result.returncode == 0
    assert desk.asked("version") == []
    for word in ("compare --quick", "./runs", "BASE_IMAGE", "DOCKER_GPUS", "DOCKER_RUN_FLAGS"):
        assert word in result.stdout


def test_the_files_that_the_image_is_built_from_are_enough(tmp_path: Path) -> None:
    """Before the other sources come, so that a change of these builds no Horovod again."""
    stage = (ROOT / "Dockerfile").read_text().replace("\\\n", "").partition("RUN touch")[0]
    for *names, target in (line.split()[1:] for line in re.findall(r"^COPY .*", stage, re.MULTILINE)):
        (tmp_path / target).mkdir(parents=True, exist_ok=True)
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / target, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, tmp_path / target)
    (tmp_path / "hvd_ckpt" / "__init__.py").touch()
    words = sys.executable, "-m", "hvd_ckpt.app.install.build_horovod", "--print-key"
    result = run_command(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert result.stdout.startswith("horovod-"), result.stderr
