"""run_docker_checkpoint_sequential.sh: what it asks of Docker, what it says without it, and what a container leaves behind.

Building the image takes minutes, so a program called docker stands in for the real one and notes its arguments. Where
an engine answers, the script also runs for real on a small image that has this image's entry point.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "run_docker_checkpoint_sequential.sh"
SETTINGS = re.compile(  # of the script, or handed on by it
    r"DOCKER_(GPUS|IMAGE|BUILD_FLAGS|RUN_FLAGS)$|BASE_IMAGE$|NP$|OMP_|HOROVOD_|OMPI_|NCCL_|GLOO_"
)

STAND_IN = r"""#!/usr/bin/env bash
printf '%s\0' "$@" >"$CALLS/$(ls "$CALLS" | wc -l)"
case "$1" in
    version) echo "$DAEMON"; exit "${VERSION_STATUS:-0}" ;;
    info) echo "$SECURITY" ;;
    build) echo "Step 1/1"; exit "${BUILD_STATUS:-0}" ;;
    run) echo "the command's output"; exit "${RUN_STATUS:-0}" ;;
esac
"""


def own_environment() -> dict[str, str]:
    """This process's environment without what would change the script's behaviour."""
    return {name: value for name, value in os.environ.items() if not SETTINGS.match(name)}


class Desk:
    """A folder to start the script from, with a stand-in for docker first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder"
        self.calls = folder / "calls"
        self.bin = folder / "bin"
        for path in (self.folder, self.calls, self.bin):
            path.mkdir()
        (self.bin / "docker").write_text(STAND_IN)
        (self.bin / "docker").chmod(0o755)
        self.environment = own_environment() | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "DAEMON": "20.10",
            "SECURITY": "[name=seccomp,profile=default]",
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / SCRIPT), *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def asked(self, command: str) -> list[list[str]]:
        """The arguments of every ``docker COMMAND``, in order."""
        files = sorted(self.calls.iterdir(), key=lambda path: int(path.name))
        calls = [path.read_text().split("\0")[:-1] for path in files]
        return [call[1:] for call in calls if call[0] == command]


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
    assert desk.run().returncode == 0
    assert desk.asked("run")[1][-1] == "hvd_ckpt"  # without arguments, the main job


def test_the_container_is_the_callers_and_sees_the_results_folder_only(desk: Desk) -> None:
    assert desk.run("doctor").returncode == 0
    (run,) = desk.asked("run")
    runs = desk.folder / "runs"
    assert runs.is_dir() and runs.stat().st_uid == os.getuid()
    assert value_after(run, "--mount") == f"type=bind,source={runs},target={runs}"
    assert value_after(run, "--workdir") == str(desk.folder)
    assert value_after(run, "--user") == f"{os.getuid()}:{os.getgid()}"
    assert {"--rm", "--ipc=host"} <= set(run)
    assert not {"--tty", "--interactive", "--gpus", "--env"} & set(run)


@pytest.mark.parametrize(
    ("security", "flags"),
    [
        ("[name=seccomp name=rootless]", "--user 0:0"),
        ("[name=seccomp name=userns]", f"--user {os.getuid()}:{os.getgid()} --userns=host"),
    ],
)
def test_daemons_that_map_users(desk: Desk, security: str, flags: str) -> None:
    assert desk.run(SECURITY=security).returncode == 0
    assert flags in " ".join(desk.asked("run")[0])


def test_gpus_are_for_a_cuda_image(desk: Desk) -> None:
    base = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
    desk.run(BASE_IMAGE=base)
    desk.run(BASE_IMAGE=base, DOCKER_GPUS="device=1")
    desk.run(BASE_IMAGE=base, DOCKER_GPUS="")
    desk.run(BASE_IMAGE="debian:trixie-slim")
    builds, runs = desk.asked("build"), desk.asked("run")
    assert [value_after(build, "--build-arg") for build in builds[2:]] == [
        f"BASE_IMAGE={base}",
        "BASE_IMAGE=debian:trixie-slim",
    ]
    assert [value_after(build, "--tag") for build in builds[2:]] == ["hvd_ckpt:cuda", "hvd_ckpt"]
    assert [value_after(run, "--gpus") for run in runs[:2]] == ["all", "device=1"]
    assert "--gpus" not in runs[2] and "--gpus" not in runs[3]


def test_flags_and_settings_are_handed_on(desk: Desk) -> None:
    result = desk.run(
        "compare",
        DOCKER_IMAGE="mine:1",
        DOCKER_BUILD_FLAGS="--network=host --build-arg A=*",
        DOCKER_RUN_FLAGS="--network=host --volume /data:/data",
        NP="4",
        HOROVOD_CYCLE_TIME="2",
    )
    assert result.returncode == 0, result.stderr
    (build,), (run,) = desk.asked("build"), desk.asked("run")
    assert build[-4:] == ["--network=host", "--build-arg", "A=*", str(ROOT)]
    assert run[-5:] == ["--network=host", "--volume", "/data:/data", "mine:1", "compare"]
    named = [run[i + 1] for i, word in enumerate(run) if word == "--env"]
    assert sorted(named) == ["HOROVOD_CYCLE_TIME", "NP"]  # Docker takes the values from the environment


def test_a_terminal_where_there_is_one(desk: Desk) -> None:
    here, there = pty.openpty()
    try:
        process = subprocess.run(
            ["bash", str(ROOT / SCRIPT), "doctor"],
            cwd=desk.folder,
            env=desk.environment,
            stdin=there,
            stdout=there,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    finally:
        os.close(here)
        os.close(there)
    assert process.returncode == 0
    assert {"--tty", "--interactive"} <= set(desk.asked("run")[0])


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 1
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word in errors[0]


def test_no_docker(desk: Desk) -> None:
    (desk.bin / "docker").unlink()
    for tool in ("bash", "dirname", "id"):
        found = shutil.which(tool)
        assert found is not None, tool
        (desk.bin / tool).symlink_to(found)
    result = desk.run(PATH=str(desk.bin))
    assert_refused(result, "docker was not found", "bash main.sh")
    assert len(result.stderr.splitlines()) == 1


def test_what_goes_wrong_is_one_line(desk: Desk) -> None:
    assert_refused(desk.run(VERSION_STATUS="1", DAEMON="\nCannot connect to it."), "(Cannot connect to it.)")
    assert not (desk.folder / "runs").exists()
    assert_refused(desk.run(BUILD_STATUS="100"), "hvd_ckpt could not be built on debian:bookworm-slim")
    assert desk.asked("run") == []
    (desk.folder / "runs").rmdir()
    (desk.folder / "runs").write_text("a file")
    assert_refused(desk.run(), f"results cannot be written to {desk.folder / 'runs'}")
    assert len(desk.asked("build")) == 1


def test_help_needs_no_docker(desk: Desk) -> None:
    result = desk.run("--help")
    assert result.returncode == 0
    assert desk.asked("version") == []
    for word in ("compare --quick", "./runs", "BASE_IMAGE", "DOCKER_GPUS", "DOCKER_RUN_FLAGS"):
        assert word in result.stdout


BASE = "debian:bookworm-slim"
DOCKERFILE = f"""
FROM {BASE}
COPY main.sh /hvd_ckpt/
ENTRYPOINT ["bash", "/hvd_ckpt/main.sh"]
"""
MAIN = """
case "$1" in
    write) id -u >runs/user; echo written; exit 7 ;;
    wait)
        trap 'echo interrupted >runs/end; exit 130' INT
        echo started >runs/start
        while true; do sleep 0.1; done ;;
esac
"""


def docker(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def engine() -> None:
    """Skips where no Docker engine answers, or none that has the base image or can get it."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if docker("version", "--format", "{{.Server.Version}}").returncode != 0:
        pytest.skip("Docker's daemon does not answer")
    if docker("image", "inspect", BASE).returncode != 0 and docker("pull", BASE).returncode != 0:
        pytest.skip(f"{BASE} is not here and cannot be pulled")


class Tree:
    """A repository that has the script, and a main.sh and a Dockerfile that take a second to build and run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a repository"
        self.root.mkdir()
        self.image = f"hvd_ckpt-test:{os.getpid()}"
        shutil.copy(ROOT / SCRIPT, self.root)
        (self.root / "Dockerfile").write_text(DOCKERFILE)
        (self.root / "main.sh").write_text(MAIN)
        self.command = ["bash", SCRIPT]
        self.environment = own_environment() | {
            "DOCKER_IMAGE": self.image,
            "DOCKER_RUN_FLAGS": "--network=none",
        }

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 120
        while not (self.root / "runs" / name).exists():
            assert time.monotonic() < deadline, f"the container did not write runs/{name}"
            time.sleep(0.05)

    def containers(self) -> str:
        return docker("ps", "--all", "--quiet", "--filter", f"ancestor={self.image}").stdout


@pytest.fixture
def tree(tmp_path: Path, engine: None) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    docker("image", "rm", "--force", tree.image)


def test_results_and_exit_status_of_a_container(tree: Tree) -> None:
    owner = os.getuid() or 12345
    if os.getuid() == 0:  # as called with sudo in a user's folder
        os.chown(tree.root, owner, owner)
    result = subprocess.run(
        [*tree.command, "write"],
        cwd=tree.root,
        env=tree.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (7, "written\n"), result.stderr
    user = tree.root / "runs" / "user"
    assert int(user.read_text()) == user.stat().st_uid == user.parent.stat().st_uid == owner
    assert tree.containers() == ""


@pytest.mark.parametrize("terminal", [False, True], ids=["no terminal", "terminal"])
def test_ctrl_c_ends_the_container(tree: Tree, terminal: bool) -> None:
    here, there = pty.openpty()
    output = there if terminal else subprocess.DEVNULL
    process = subprocess.Popen(
        [*tree.command, "wait"],
        cwd=tree.root,
        env=tree.environment,
        stdin=output,
        stdout=output,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        tree.wait_for("start")
        if terminal:
            os.write(here, b"\x03")
        else:
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(here)
        os.close(there)
    assert (tree.root / "runs" / "end").read_text() == "interrupted\n"
    assert tree.containers() == ""
