"""Building Horovod once: the cache and its key, and builds that fail, are interrupted or get the wrong source.

A small package stands in for Horovod's source: it has the lines that are patched and builds in a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import add_program, run_command

from hvd_ckpt.app.install import build_horovod, recipe
from hvd_ckpt.app.install.cuda import GpuOperations
from hvd_ckpt.utils.folders import cache_folder

pytestmark = pytest.mark.launch

CPU = GpuOperations(None, None, None, "")

SETUP = """
import os, sys, time
from pathlib import Path
from setuptools import setup
{action}
folder = Path("horovod/torch")
(folder / "mpi_lib_v2.stand_in.so").write_text(os.environ["HOROVOD_WITH_MPI"])
setup(name="horovod", version="0.28.1", packages=["horovod", "horovod.torch"], package_data={{"": ["*.so"]}})
"""

DRIVER = """
import sys
from hvd_ckpt.app.install import build_horovod, recipe
from hvd_ckpt.utils import text
text.SECONDS = 0.2
build_horovod.SDIST_SHA256 = recipe.SDIST_SHA256 = sys.argv[1]
build_horovod.build_horovod(sys.argv[2:])
"""


class Bench:
    """A cache folder and a stand-in for Horovod's source whose setup.py does ``action`` first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"

    def write_sdist(self, action: str = "") -> Path:
        files = {"horovod/__init__.py": "", "horovod/torch/__init__.py": ""}
        files["setup.py"] = SETUP.format(action=action)
        for name, old, _ in recipe.PATCHES:
            files[name] = files.get(name, "") + (f'"""{old}"""\n' if name == "setup.py" else old)
        path = self.folder / "sdist.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        return path

    def command(self, sdist: Path, sha256: str | None = None) -> list[str]:
        digest = sha256 or hashlib.sha256(sdist.read_bytes()).hexdigest()
        options = ["--no-install", "--cache", str(self.cache), "--sdist", str(sdist)]
        return [sys.executable, "-c", DRIVER, digest, *options]

    def run(self, sdist: Path, sha256: str | None = None) -> subprocess.CompletedProcess[str]:
        return run_command(*self.command(sdist, sha256))

    def leftovers(self) -> list[str]:
        """What a build left in the cache besides its log."""
        names = (path.name for path in self.cache.iterdir())
        return [name for name in names if name not in ("lock", "logs", "sdist")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_wheel_is_built_once(bench: Bench) -> None:
    """In a cache whose path has a space, which Horovod's build does not see."""
    bench.cache = bench.folder / "a cache"
    sdist = bench.write_sdist(
        "assert ' ' not in os.getcwd() + sys.prefix + os.environ['PATH'].split(':')[0], os.getcwd()\n"
        "print('[1/2] c++', flush=True); time.sleep(0.5)"
    )
    first = bench.run(sdist)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count(" 50 %") > 1, "a line comes while a long step lasts, too"
    wheel = Path(first.stdout.splitlines()[-1])
    assert wheel.parent.parent == bench.cache and bench.leftovers() == [wheel.parent.name]
    written = wheel.stat().st_mtime_ns
    assert bench.run(sdist).stdout.splitlines() == [str(wheel)]
    assert wheel.stat().st_mtime_ns == written
    wheel.write_bytes(wheel.read_bytes()[:-10])
    assert "Building Horovod" in bench.run(sdist).stdout
    assert json.loads((wheel.parent / "build.json").read_text())["sha256"] == _sha256(wheel)


def test_mpis_compiler_wrapper_names_no_path_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI's wrapper prints the path of its environment unquoted, where CMake would cut it at the space.

    And as many compilers run at a time as the memory has room for.
    """
    environment, folder = tmp_path / "an environment", tmp_path / "build"
    add_program(environment / "bin" / "mpicxx", f'echo "$1 -I{environment}/include"\nexit 3')
    folder.mkdir()
    (environment / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(recipe, "machine_memory", lambda: (5 * 2**30, 0))  # as a container may limit it
    build = recipe.build_environment(recipe.Target("2.13.0", CPU, "cp311", "linux", "4.1.8"), folder)
    assert build["CMAKE_BUILD_PARALLEL_LEVEL"] == "1"
    found = shutil.which("mpicxx", path=build["PATH"])
    assert found is not None
    answer = run_command(found, "-showme")
    assert (answer.stdout, answer.returncode) == (f"-showme -I{folder}/env/include\n", 3)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_that_fails_leaves_its_log_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench.run(bench.write_sdist("sys.exit('the compiler is unhappy')"))
    assert result.returncode == 1
    error, kept, *_ = (line for line in result.stderr.splitlines() if line)
    assert error.startswith("error: ") and "the compiler is unhappy" in error
    _, log = kept.split("nothing was kept but its log, ")
    assert "the compiler is unhappy" in Path(log).read_text()

    wanted, sdist = "0" * 64, bench.write_sdist()
    result = bench.run(sdist, sha256=wanted)
    assert result.returncode == 1 and wanted in result.stderr and _sha256(sdist) in result.stderr

    file = recipe.PATCHES[0][0]
    monkeypatch.setattr(recipe, "PATCHES", recipe.PATCHES[1:])
    result = bench.run(bench.write_sdist())  # to which the first patch does not fit
    assert result.returncode == 1 and f"Horovod's {file}" in result.stderr
    assert bench.leftovers() == []


SLOW = """
import signal
def stop(number, frame):
    Path({folder!r}, "asked").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
Path({folder!r}, "new").write_text(str(os.getpid()))
os.rename(Path({folder!r}, "new"), Path({folder!r}, "started"))
time.sleep(300)
"""


def start_slow_build(bench: Bench) -> tuple[subprocess.Popen[str], int]:
    """A build that waits, and the process id of its build tool, which notes when it is asked to end."""
    started = bench.folder / "started"
    process = subprocess.Popen(
        bench.command(bench.write_sdist(SLOW.format(folder=str(bench.folder)))),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: started.exists() or process.poll() is not None)
    assert started.exists(), process.communicate()
    return process, int(started.read_text())


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupted_build_leaves_nothing(bench: Bench) -> None:
    process, compiler = start_slow_build(bench)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors
    assert bench.leftovers() == []
    assert (bench.folder / "asked").exists(), "killed unasked: a build tool could not end its compilers"
    wait_until(lambda: not psutil.pid_exists(compiler))


def test_a_killed_build_is_cleaned_up_by_the_next(bench: Bench) -> None:
    process, compiler = start_slow_build(bench)
    process.kill()
    process.communicate(timeout=120)
    os.kill(compiler, signal.SIGKILL)
    assert [name[:10] for name in bench.leftovers()] == [".building-"]
    result = bench.run(bench.write_sdist())
    assert result.returncode == 0, result.stderr
    assert bench.leftovers() == [Path(result.stdout.splitlines()[-1]).parent.name]


ASSIGNMENT = """
#include "flatbuffers/stl_emulation.h"
void assign(flatbuffers::span<int>& to, const flatbuffers::span<int>& from) { to = from; }
"""


def test_the_patched_source_suits_newer_compilers(tmp_path: Path) -> None:
    """g++ 13 wants each header included where it is used; g++ 15 checks an assignment that nobody calls."""
    sdist = build_horovod.cache_folder() / "sdist" / "horovod-0.28.1.tar.gz"
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not sdist.is_file():
        pytest.skip("needs a C++ compiler, and Horovod's source in the user's cache")
    source = recipe.unpack_and_patch(sdist, tmp_path)
    assert "#include <string>" in (source / "horovod" / "common" / "group_table.h").read_text()
    assert "libcuda.so.1" in (source / "horovod" / "torch" / "cuda_util.cc").read_text()
    command = [compiler, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++", "-"]
    command += ["-isystem", str(source / "third_party" / "flatbuffers" / "include")]
    result = subprocess.run(command, input=ASSIGNMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_horovodrun_tells_of_a_failed_rank_in_one_line() -> None:
    (old, new) = next(patch[1:] for patch in recipe.PATCHES if patch[0] == "horovod/runner/launch.py")
    spec = importlib.util.find_spec("horovod.runner.launch")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text().replace(old, new)  # it may be built with the patch already

    def fails(_: object) -> None:
        raise RuntimeError("one or more processes exited:\nProcess name: 1\nExit code: 3\n")

    launch = {"__name__": "launch"}
    exec(compile(source, spec.origin, "exec"), launch)
    launch.update(parse_args=lambda: argparse.Namespace(log_level=None), _run=fails)
    with pytest.raises(SystemExit, match="^horovodrun: one or more .* Process name: 1 Exit code: 3$"):
        launch["run_commandline"]()


def test_the_key_names_everything_a_wheel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = recipe.Target("2.13.0+cpu", CPU, "cp311", "linux-x86_64-glibc2.36", "4.1.8")
    nccl = GpuOperations("NCCL", "/usr/local/cuda", None, "")
    changes: list[dict[str, Any]] = [
        {"gpu": nccl},
        {"gpu": dataclasses.replace(nccl, kind="HOST")},
        {"gpu": dataclasses.replace(nccl, architectures="90")},
        {"torch": "2.13.0+cu130"},
        {"torch": "2.12.0+cpu"},
        {"python": "cp312"},
        {"platform": "linux-aarch64-glibc2.36"},
        {"mpi": "5.0.0"},
    ]
    keys = [target.key, *(dataclasses.replace(target, **changed).key for changed in changes)]
    for part in ("0.28.1", "2.13.0+cpu", "cp311", "linux-x86_64", "mpi-gloo"):
        assert part in target.key
    assert "mpi-gloo-nccl" in keys[1]
    monkeypatch.setattr(recipe, "FLAGS", {**recipe.FLAGS, "HOROVOD_WITH_GLOO": "0"})
    keys.append(target.key)
    assert len(set(keys)) == len(keys)
    assert target.key == dataclasses.replace(target).key


def test_the_built_extension_finds_its_libraries_relative_to_itself(tmp_path: Path) -> None:
    wheel = build_horovod.cached_wheel(cache_folder(), recipe.detect_target().key)
    if wheel is None or shutil.which("readelf") is None:
        pytest.skip("needs readelf, and Horovod's wheel in the user's cache")
    shutil.unpack_archive(wheel, tmp_path, "zip")
    (extension,) = (tmp_path / "horovod" / "torch").glob("mpi_lib_v2*.so")
    dynamic = run_command("readelf", "-d", extension).stdout
    (path,) = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic)
    (patched,) = re.findall(r"\n\+set\(CMAKE_INSTALL_RPATH (.*)\)\n", recipe.SOURCE_PATCH.read_text())
    assert path.split(":") == [entry.strip('"\\') for entry in patched.split()]
    assert all(entry.startswith("$ORIGIN/") for entry in path.split(":"))
    assert not re.findall(r"\(NEEDED\).*\[/", dynamic)
