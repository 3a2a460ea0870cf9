"""Tests of hvd-ckpt doctor: its findings here, and its messages if Horovod is missing, broken or cannot start ranks."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from forked import Case, Result, run_forked

from hvd_ckpt.app.cli import doctor
from hvd_ckpt.app.cli.doctor import Finding
from hvd_ckpt.processes.probe import OPERATIONS
from hvd_ckpt.utils.extras import apex_unavailable

IMPORTS = "import os, sys, torch\nfrom unittest.mock import patch\nfrom hvd_ckpt.app.cli.main import main"
pytestmark = pytest.mark.launch

SETTINGS = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_SECRET_KEY": "hush", "OMP_NUM_THREADS": "1"}
NO_HOROVOD = "sys.modules['horovod'] = None\n"
NO_USER = "patch('pwd.getpwuid', side_effect=KeyError).start()\n"  # the password file does not know the user
BROKEN = "patch('hvd_ckpt.app.cli.doctor.horovod_build', side_effect=ImportError({!r})).start()\n"
WRITABLE = "horovodrun keeps its cache in ~/.horovod: set HOME to a folder that you can write to"
FAULTS = {  # what runs before, the environment, and what is said
    "no PyTorch": ("sys.modules['torch'] = None\n", {}, ["PyTorch does not load"]),
    "no Horovod": (NO_HOROVOD, {}, ["problem: Horovod is not installed: run `hvd-ckpt build-horovod`"]),
    "no compiler": (NO_HOROVOD, {"CXX": "/no/such/compiler"}, ["CXX=/no/such/compiler"]),
    "no home": (NO_HOROVOD + NO_USER + "del os.environ['HOME']\n", {}, ["HOME is not set", WRITABLE]),
    "no such home": (NO_HOROVOD, {"HOME": "/proc/no/home"}, ["/proc/no/home", WRITABLE]),
    "Horovod for another PyTorch": (
        BROKEN.format("mpi_lib_v2.so: undefined symbol: _ZN5torch3jit"),
        {},
        ["does not load", "undefined symbol", "hvd-ckpt build-horovod"],
    ),
    "Horovod without PyTorch": (
        BROKEN.format("Extension horovod.torch has not been built: no such file"),
        {},
        ["built without PyTorch", "hvd-ckpt build-horovod"],
    ),
    "no time": ("sys.argv += ['--timeout', '1']\n", {}, ["no controller works", "within 1 seconds"]),
}


def path_without_ssh(folder: Path) -> str:
    """PATH as on a small system: Open MPI looks for ssh, even to start ranks on one machine."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if os.access(place, os.R_OK | os.X_OK) else ():
            if program.name not in ("ssh", "rsh") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """``hvd-ckpt doctor`` in fresh processes, in which something is missing."""
    command = "main(['doctor', *sys.argv[1:]])"
    cases = {name: Case(before + command, environment) for name, (before, environment, _) in FAULTS.items()}
    path = path_without_ssh(tmp_path_factory.mktemp("bin"))
    cases["healthy"] = Case(command, {"PATH": path, **SETTINGS}, ("--json",))
    return run_forked(IMPORTS, cases, seconds=400)


def test_what_is_installed_and_works(results, capsys) -> None:
    assert results["healthy"].returncode == 0, results["healthy"]
    findings = [Finding(**finding) for finding in json.loads(results["healthy"].stdout)]
    found = {finding.what: finding for finding in findings}
    assert sys.executable in found["Python"].found and found["PyTorch"].found == torch.__version__
    assert (found["CUDA"].mark == "ok") is torch.cuda.is_available()
    assert found["Horovod"].found.startswith("0.28.1")
    assert not any(finding.problem for finding in findings)
    for name in doctor.CONTROLLERS:
        controller = found[f"controller {name}"]
        assert (controller.mark == "ok") is (name.upper() in found["Horovod"].found), controller
    assert {finding.found for finding in findings if finding.what == "  on cpu"} == {", ".join(OPERATIONS)}
    assert {"HOROVOD_CYCLE_TIME=2", "OMP_NUM_THREADS=1"} <= {*found["environment"].found.split("\n")}
    assert "hush" not in repr(findings)
    doctor.print_table(findings)
    shown = capsys.readouterr().out
    for text in ("PyTorch", "0.28.1", "gloo", "mpi", "HOROVOD_CYCLE_TIME=2", "OMPI_MCA_plm"):
        assert text in shown
    assert "problem" not in shown


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_missing_is_said_below_the_table_with_status_1(results, name) -> None:
    result = results[name]
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert result.returncode == 1 and "Traceback" not in result.stdout + result.stderr
    for text in FAULTS[name][-1]:
        assert sum(text in problem for problem in problems) == 1, result.stdout


def test_what_gpus_pytorch_is_for_and_what_carries_tensors_between_stages(monkeypatch) -> None:
    def found(facts: doctor.Facts, link: str = "nccl") -> dict[str, str]:
        monkeypatch.setenv("HVD_CKPT_LINK", link)
        return {finding.what: finding.found for finding in doctor.of_torch(facts)}

    here = doctor.torch_facts()
    on_gpus = here | {"cuda_available": True, "nccl": "2.29.7", "nccl_groups": True}
    assert "tensors on CPUs over MPI" in found(here)["stages and parts"]
    assert "tensors on GPUs over NCCL 2.29.7" in found(on_gpus)["stages and parts"]
    assert "through host memory" in found(on_gpus, "host")["stages and parts"]
    on_rocm = here | {"cuda_built": None, "rocm_built": "6.4", "cuda_available": True, "devices": ["AMD"]}
    assert found(on_rocm)["CUDA"] == "built for ROCm 6.4, AMD"

    def fail() -> None:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    (driver,) = doctor.of_torch(doctor.torch_facts())
    assert (driver.found, driver.mark) == ("CUDA unknown error", "!")


@pytest.mark.parametrize(
    ("amp", "has_cuda", "words"),
    [
        (None, True, "no apex.amp that loads"),
        (SimpleNamespace(), True, "no apex.amp.initialize"),
        (SimpleNamespace(initialize=None), False, "needs a CUDA device"),
        (SimpleNamespace(initialize=None), True, "None"),
    ],
)
def test_packages_called_apex(monkeypatch, amp, has_cuda, words) -> None:
    apex = ModuleType("apex")
    apex.__spec__ = ModuleSpec("apex", None)
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert words in str(apex_unavailable())
