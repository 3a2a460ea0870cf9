"""Tests of the source archive and the wheel: their contents, and a job of two ranks in an environment that has only the wheel."""

from __future__ import annotations

import email.parser
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from commands import run_command

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
# What git ignores, and what only git reads.
NOT_RELEASED = shutil.ignore_patterns(
    ".git", ".gitignore", ".venv", "__pycache__", "*.egg-info", "build", "dist", "site", "runs", ".*_cache",
    ".hypothesis", ".coverage*", "*.log",
)  # fmt: skip
HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
SCRIPT = """
import torch, hvd_ckpt as hc
hc.init()
torch.manual_seed(0)
model = hc.CheckpointSequential([torch.nn.Linear(4, 4) for _ in range(4)], segments=2)
optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + hc.rank())).sum().backward()
    optimizer.step()
print(f"trained on {hc.size()} ranks with {hc.__file__}")
"""


def build(kind: str, source: Path, folder: Path) -> Path:
    """What ``python -m build`` runs, with the setuptools of this environment."""
    folder.mkdir(exist_ok=True)
    done = run_command(sys.executable, "-c", HOOK, f"build_{kind}", str(folder), cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, since a build writes into its folder."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "hvd_ckpt", ignore=NOT_RELEASED))


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in the source archive of the repository, unpacked."""
    released = files_of(source)
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, folder)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have none
        archive.extractall(folder)
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    assert files_of(root) == released
    return root


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the source archive."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def files_of(folder: Path) -> set[str]:
    """The files of a repository, without those that a build adds."""
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if not path.startswith("hvd_ckpt.egg-info/") and path != "PKG-INFO"}


def test_the_wheel_has_the_library_and_the_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        facts = email.parser.Parser().parsestr(archive.read(metadata).decode())
        (commands,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "hvd-ckpt = hvd_ckpt.app.cli.main:main" in archive.read(commands).decode()
    package = {f"hvd_ckpt/{name}" for name in files_of(ROOT / "hvd_ckpt") if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {"hvd_ckpt/py.typed", "hvd_ckpt/__init__.pyi"} <= package
    setup = re.search(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", changes, re.MULTILINE)
    assert setup and newest and setup[1] == newest[1] == facts["Version"]
    assert not [name for name in facts if name.startswith("License")]  # the owner's choice
    assert facts.get_all("Classifier") and facts.get_all("Project-URL")
    assert facts["Description-Content-Type"] == "text/markdown"
    assert facts.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_trains_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing else; PyTorch and other requirements are those of the environment of the tests."""
    folder = tmp_path / "environment"
    venv.create(folder)
    python = str(folder / "bin" / "python")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    requirements = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "requirements.pth").write_text("\n".join(requirements))  # not what .pth files there name
    # What setuptools puts there: Horovod's launcher imports distutils, which Python 3.12 has no longer.
    (packages / "setuptools.pth").write_text("import _distutils_hack; _distutils_hack.add_shim()")
    ours = ("PYTHONPATH", "HVD_CKPT_TESTS_FORK_SERVER")
    environment = {name: value for name, value in os.environ.items() if name not in ours}

    def run(*command: str) -> str:
        done = run_command(*command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    pip = python, "-m", "pip", "install", "--quiet"
    run(*pip, "--no-index", "--no-deps", "--ignore-installed", str(wheel))
    command = str(folder / "bin" / "hvd-ckpt")
    assert run(command, "--version").startswith(f"hvd-ckpt {wheel.name.split('-')[1]}, Horovod ")
    assert run(command, "build-horovod", "--print-key").startswith("horovod-")
    (tmp_path / "train.py").write_text(SCRIPT)
    said = run(python, "-m", "horovod.runner.launch", "-np", "2", "--gloo", python, "train.py")
    assert said.count(f"trained on 2 ranks with {packages}") == 2, said
