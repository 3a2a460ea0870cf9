"""Build of Horovod for the PyTorch of this Python environment, once per machine, and its installation.

There is no wheel of Horovod for a current PyTorch: Horovod compiles against the C++ headers of PyTorch, and its last release sets
C++14 where these headers need C++20. This script takes the source of that release, checks its sha256 and raises the standard. It
builds a wheel with MPI and Gloo, and with NCCL for a CUDA PyTorch on a machine with GPUs. It keeps the wheel in the user's cache
folder under a key with everything that the build depends on. The wheel finds MPI and PyTorch relative to itself, so it works in
each environment with that key.

A build runs in a folder with a temporary name, which is renamed when the wheel is complete. A build that fails or is interrupted
leaves only its log. ``main.sh`` runs this module, and ``hvd-ckpt build-horovod`` runs its command.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.install.prerequisites import BuildError, first_error, missing_for_build
from hvd_ckpt.app.install.recipe import (
    HOROVOD_VERSION,
    SDIST_SHA256,
    Target,
    build_environment,
    check_sdist,
    detect_target,
    sha256,
    unpack_and_patch,
)
from hvd_ckpt.utils.extras import pip_command
from hvd_ckpt.utils.folders import cache_folder
from hvd_ckpt.utils.text import Heartbeat


def obtain_sdist(cache: Path, given: Path | None, log: Path) -> Path:
    """The source archive: the given one, the cached one or a new download, with its sha256 checked."""
    name = f"horovod-{HOROVOD_VERSION}.tar.gz"
    if given is not None:
        if not given.is_file():
            raise BuildError(f"--sdist {given}: no such file.")
        check_sdist(given)
        return given
    cached = cache / "sdist" / name
    if cached.is_file() and sha256(cached) == SDIST_SHA256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--dest", folder, f"horovod=={HOROVOD_VERSION}"]
        if _run_logged(command, log) != 0 or not Path(folder, name).is_file():
            raise BuildError(f"Horovod's source could not be downloaded: {_cause(log)}\n  the log is {log}")
        check_sdist(Path(folder, name))
        os.replace(Path(folder, name), cached)
    return cached


def _run_logged(
    command: list[str], log: Path, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> int:
    """Runs a command, appends its output to the log and prints the progress of the build, or at least one line every 30 seconds.
    An interrupt also ends the command.
    """
    shown, step, start = -1, "", time.monotonic()

    def say(text: str) -> None:
        print(f"  {text}{time.monotonic() - start:.0f} s", flush=True)

    with log.open("a", errors="replace") as file, Heartbeat(lambda: say(step)) as beat:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            cwd=cwd,
            # A process group of its own, which _end() signals as a whole; Ctrl-C in the terminal comes to this process alone.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                counts = re.match(r"\s*\[(\d+)/(\d+)\]", line)
                if counts is None:
                    continue
                done, steps = map(int, counts.groups())
                step = f"{100 * done // steps:3d} %  "
                if 10 * done // steps > shown:
                    shown = 10 * done // steps
                    beat.said()
                    say(step)
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[str], patience: float = 5.0) -> None:
    """Ends a build and everything that it has started. Ninja ends its compilers, which are in other process groups, on SIGTERM."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises once the whole group has ended
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _build_lock(cache: Path) -> Iterator[None]:
    """A context for one build at a time per cache. It removes what a killed build has left."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another build in {cache} to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache.glob(".building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def cached_wheel(cache: Path, key: str) -> Path | None:
    """The complete wheel of that key, if its contents are as recorded; else None."""
    try:
        record = json.loads((cache / key / "build.json").read_text())
        wheel = cache / key / str(record["wheel"])
        return wheel if sha256(wheel) == record["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def build(target: Target, cache: Path, sdist: Path | None = None) -> Path:
    """The wheel for the target, from the cache or from a new build."""
    wheel = cached_wheel(cache, target.key)
    if wheel is not None:
        return wheel
    with _build_lock(cache):
        # Another process may have built it while this one waited for the lock.
        wheel = cached_wheel(cache, target.key)
        return wheel if wheel is not None else _build_now(target, cache, sdist)


def _cause(log: Path) -> str:
    """The line of a log with the cause of a failure; without an error in the log, the last line before those of pip."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = itertools.takewhile(lambda line: "subprocess-exited-with-error" not in line, lines)
    return first_error(lines) or next(reversed(list(ours)), "no reason was given")[:300]


def missing_prerequisites() -> list[str]:
    """Missing prerequisites of a build in this environment, each with the way to install it."""
    path = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)])
    return missing_for_build(path, pip_command("build"))


def _build_now(target: Target, cache: Path, given: Path | None) -> Path:
    if missing := missing_prerequisites():
        raise BuildError("\n  ".join(["Horovod cannot be built here; what is missing:", *missing]))
    log = cache / "logs" / f"{target.key}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    print(
        f"Building Horovod {HOROVOD_VERSION} ({target.operations}) for torch {target.torch}: minutes, once."
    )
    print(f"  {target.gpu.described}\n  log: {log}", flush=True)
    # In the cache, where the next build finds what a killed build has left. The tools of the build need a path without spaces.
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=None if " " in str(cache) else cache))
    # In the cache in any case, since a rename does not lead from one file system to another.
    finished = cache / f".building-{os.getpid()}"
    try:
        source = unpack_and_patch(obtain_sdist(cache, given, log), folder)
        environment = build_environment(target, folder)
        command = [str(folder / "env" / "bin" / Path(sys.executable).name), "-m", "pip", "wheel", "-v"]
        command += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder / "result"), "."]
        status = _run_logged(command, log, environment, source)
        wheels = list((folder / "result").glob("*.whl"))
        if status != 0 or len(wheels) != 1 or not _has_extension(wheels[0]):
            raise BuildError(
                f"Horovod's build failed: {_cause(log)}\n  exit status {status}; nothing was kept but its log, {log}"
            )
        finished.mkdir()
        wheel = Path(shutil.copy(wheels[0], finished))
        record = {"wheel": wheel.name, "sha256": sha256(wheel), "torch": target.torch, "mpi": target.mpi}
        (finished / "build.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(cache / target.key, ignore_errors=True)
        # From here on the wheel counts: its folder has its name only when the record is in it.
        os.replace(finished, cache / target.key)
        return cache / target.key / wheel.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(finished, ignore_errors=True)


def _has_extension(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(re.fullmatch(r"horovod/torch/mpi_lib_v2\..*so", name) for name in archive.namelist())


def is_installed(wheel: Path) -> bool:
    """Whether the Horovod of this environment was installed from that wheel (pip records the address and sha256 of a wheel)."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        origin: dict[str, Any] = json.loads(text or "{}")
    except importlib.metadata.PackageNotFoundError:
        return False
    recorded = str(origin.get("archive_info", {}).get("hash", ""))
    return recorded == "sha256=" + str(json.loads((wheel.parent / "build.json").read_text())["sha256"])


def install(wheel: Path, log: Path) -> None:
    """Installs the wheel into this environment and loads it once.

    A wheel that does not load stays in the cache, since other environments may load it.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(wheel)]
    if _run_logged(command, log) != 0:
        raise BuildError(f"Horovod's wheel could not be installed: {_cause(log)}\n  the log is {log}")
    if _run_logged([sys.executable, "-c", "import horovod.torch"], log) != 0:
        raise BuildError(
            f"the installed Horovod does not load: {_cause(log)}\n  remove {wheel.parent} to build it again; the log is {log}"
        )


@click.command()
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="Folder that keeps wheels (default: the user's cache folder).",
)
@click.option(
    "--sdist", type=click.Path(path_type=Path), help="Horovod's source archive, instead of a download."
)
@click.option("--no-install", is_flag=True, help="Build only, and print the wheel's path.")
@click.option("--print-key", is_flag=True, help="Print the name of the wheel in the cache and stop.")
def build_horovod(cache: Path | None, sdist: Path | None, no_install: bool, print_key: bool) -> None:
    """Build Horovod for this environment's PyTorch and install it.

    The build takes minutes, once: its wheel is kept, and serves every environment with the same Python, PyTorch and MPI.

    With PyTorch's CUDA build, Horovod's operations run on GPUs with NCCL where this machine has a GPU and nvcc, for the
    architectures of its GPUs. HOROVOD_BUILD_CUDA_CC_LIST=80,90 names others. HOROVOD_GPU_OPERATIONS=NCCL builds for all that
    nvcc knows, HOST copies tensors to the host and reduces them there, and CPU leaves GPUs out.
    """
    # As an exception, so that the clean-up of a build runs: by default, SIGTERM ends Python without it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        target = detect_target()
        if print_key:
            print(target.key)
            return
        if cache is None:
            cache = cache_folder()
        cache = cache.expanduser().resolve()
        wheel = build(target, cache, sdist)
        if no_install:
            print(wheel)
        elif not is_installed(wheel):
            print(f"Installing Horovod {HOROVOD_VERSION} for torch {target.torch}: {target.gpu.described}")
            install(wheel, cache / "logs" / f"{target.key}.install.log")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("error: interrupted; no half-built Horovod was kept.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    build_horovod()
