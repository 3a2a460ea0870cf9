"""Tests of hvd-ckpt doctor: its findings here, and its messages if Horovod is missing, broken or cannot start ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Case, Result, run_forked

from hvd_ckpt.app.cli import doctor
from hvd_ckpt.app.cli.doctor import Finding
from hvd_ckpt.processes.probe import OPERATIONS
from hvd_ckpt.utils.extras import apex_unavailable

IMPORTS = "import os, sys, torch\nfrom unittest.mock import patch\nfrom hvd_ckpt.app.cli.main import main"
pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def path_without_ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH as on a small system: Open MPI looks for ssh, even to start ranks on one machine."""
    folder = tmp_path_factory.mktemp("bin")
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if os.access(place, os.R_OK | os.X_OK) else ():
            if program.name not in ("ssh", "rsh") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


SETTINGS = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_SECRET_KEY": "hush", "OMP_NUM_THREADS": "1"}
NO_HOROVOD = "sys.modules['horovod'] = None\n"
NO_USER = "patch('pwd.getpwuid', side_effect=KeyError).start()\n"  # the password file does not know the user
BROKEN = {
    "for another PyTorch": "mpi_lib_v2.so: undefined symbol: _ZN5torch3jit",
    "without PyTorch": "Extension horovod.torch has not been built: no such file",
}


@pytest.fixture(scope="module")
def results(path_without_ssh: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """``hvd-ckpt doctor`` in fresh processes in which something is missing."""
    folder = tmp_path_factory.mktemp("doctor")

    def doctor(*arguments: str, before: str = NO_HOROVOD, **environment: str) -> Case:
        return Case(f"{before}main(['doctor', *sys.argv[1:]])", environment, arguments)

    cases = {
        "healthy": doctor("--json", before="", PATH=path_without_ssh, **SETTINGS),
        "impatient": doctor("--json", "--timeout", "1", before=""),
        "no PyTorch": doctor(before="sys.modules['torch'] = None\n"),
        "no home": doctor("--json", before=NO_HOROVOD + NO_USER + "del os.environ['HOME']\n"),
        "no such home": doctor("--json", HOME="/proc/no/home"),
        "no build": doctor("--json", CXX="/no/such/compiler"),
    }
    for name, error in BROKEN.items():
        write_package(folder / name, "horovod")
        write_package(folder / name, "horovod.torch", f"raise ImportError({error!r})")
        cases[name] = doctor(before=f"sys.path.insert(0, {str(folder / name)!r})\n")
    return run_forked(IMPORTS, cases, seconds=400)


def findings_of(result: Result) -> list[Finding]:
    return [Finding(**finding) for finding in json.loads(result.stdout)]


@pytest.fixture(scope="module")
def healthy(results: dict[str, Result]) -> list[Finding]:
    found = findings_of(results["healthy"])
    assert results["healthy"].returncode == 0, found
    return found


def test_what_is_installed_and_works(healthy: list[Finding]) -> None:
    import torch

    found = {finding.what: finding for finding in healthy}
    assert sys.executable in found["Python"].found and found["PyTorch"].found == torch.__version__
    assert (found["CUDA"].mark == "ok") is torch.cuda.is_available()
    horovod = found["Horovod"].found
    assert horovod.startswith("0.28.1")
    assert not any(finding.problem for finding in healthy)
    for name in doctor.CONTROLLERS:
        controller = found[f"controller {name}"]
        assert (controller.mark == "ok") is (name.upper() in horovod), controller
    assert {finding.found for finding in healthy if finding.what == "  on cpu"} == {", ".join(OPERATIONS)}
    assert {"HOROVOD_CYCLE_TIME=2", "OMP_NUM_THREADS=1"} <= {*found["environment"].found.split("\n")}
    assert "hush" not in repr(healthy)


def test_the_table_says_the_same(healthy: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_table(healthy)
    shown = capsys.readouterr().out
    for text in ("PyTorch", "0.28.1", "gloo", "mpi", "HOROVOD_CYCLE_TIME=2", "OMPI_MCA_plm"):
        assert text in shown
    assert "problem" not in shown


def test_the_table_says_what_gpus_pytorch_is_for_and_what_carries_tensors_between_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = doctor.torch_facts()
    on_gpus = here | {"cuda_available": True, "nccl": "2.29.7", "nccl_groups": True}
    cases = (
        (here, "nccl", "tensors on CPUs over MPI"),
        (on_gpus, "nccl", "tensors on GPUs over NCCL 2.29.7"),
        (on_gpus, "host", "through host memory"),
    )
    for facts, link, text in cases:
        monkeypatch.setenv("HVD_CKPT_LINK", link)
        found = {finding.what: finding.found for finding in doctor.of_torch(facts)}
        assert text in found["stages and parts"]
    on_rocm = here | {"cuda_built": None, "rocm_built": "6.4", "cuda_available": True, "devices": ["AMD"]}
    found = {finding.what: finding.found for finding in doctor.of_torch(on_rocm)}
    assert found["CUDA"] == "built for ROCm 6.4, AMD"


def test_a_driver_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail() -> None:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    (found,) = doctor.of_torch(doctor.torch_facts())
    assert (found.found, found.mark) == ("CUDA unknown error", "!")


def write_package(folder: Path, name: str, text: str = "") -> None:
    path = folder / name.replace(".", "/")
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(text)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_horovod(results: dict[str, Result], case: str) -> None:
    result = results[case]
    assert result.returncode == 1
    words = ("does not load", "undefined symbol") if "another" in case else ("built without PyTorch",)
    for word in (*words, "problem:", "hvd-ckpt build-horovod"):
        assert word in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def problems_of(result: Result) -> list[str]:
    assert result.returncode == 1
    return [finding.problem for finding in findings_of(result) if finding.problem]


def test_what_a_build_of_horovod_lacks(results: dict[str, Result]) -> None:
    problems = problems_of(results["no build"])
    assert problems[0].startswith("Horovod is not installed: run `hvd-ckpt build-horovod`")
    assert any("CXX=/no/such/compiler" in problem for problem in problems)


@pytest.mark.parametrize(("case", "named"), [("no home", "not set"), ("no such home", "/proc/no/home")])
def test_no_home(results: dict[str, Result], case: str, named: str) -> None:
    """horovodrun writes to ~/.horovod."""
    (problem,) = [problem for problem in problems_of(results[case]) if "HOME" in problem]
    assert "set HOME to a folder that you can write to" in problem and named in problem


def test_no_pytorch(results: dict[str, Result]) -> None:
    assert results["no PyTorch"].returncode == 1
    assert "problem: PyTorch does not load" in results["no PyTorch"].stdout


def test_a_controller_that_does_not_answer_in_time(results: dict[str, Result]) -> None:
    assert "no controller works" in problems_of(results["impatient"])[0]
    for finding in findings_of(results["impatient"]):
        if finding.what.startswith("controller"):
            assert finding.mark == "!" and (
                "within 1 seconds" in finding.found or "without it" in finding.found
            )


@pytest.fixture
def other_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    present = {name for name in sys.modules if name.split(".")[0] == "apex"}
    for name in present:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (["apex", "apex.normalization"], "no apex.amp"),
        (["apex", "apex.amp"], "needs a CUDA device"),
    ],
    ids=["newer, or another project", "with amp"],
)
def test_packages_called_apex(other_apex: Path, packages: list[str], words: str) -> None:
    import torch

    for package in packages:
        write_package(other_apex, package, "initialize = None")
    reason = apex_unavailable()
    if "apex.amp" in packages and torch.cuda.is_available():
        assert reason is None
    else:
        assert reason is not None and words in reason
