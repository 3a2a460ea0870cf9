"""hvd-ckpt doctor: what it finds here, and what it says where Horovod is missing, broken or cannot start ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ckpt.cli import doctor
from hvd_ckpt.probe import OPERATIONS

pytestmark = pytest.mark.launch


def call(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """``hvd-ckpt doctor`` in a fresh process, after the statements in ``before``."""
    code = f"import sys\n{before}\nfrom hvd_ckpt.cli.main import main\nmain(['doctor', *sys.argv[1:]])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def path_without_ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH as on a small system: Open MPI looks for ssh, even to start ranks on one machine."""
    folder = tmp_path_factory.mktemp("bin")
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name not in ("ssh", "rsh") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.fixture(scope="module")
def healthy(path_without_ssh: str) -> dict[str, Any]:
    environment = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_SECRET_KEY": "hush", "OMP_NUM_THREADS": "1"}
    result = call("--json", PATH=path_without_ssh, **environment)
    facts: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == 0, facts["problems"]
    return facts


def test_what_is_installed(healthy: dict[str, Any]) -> None:
    import torch

    assert healthy["python"]["executable"] == sys.executable
    assert healthy["torch"]["version"] == torch.__version__
    assert healthy["torch"]["cuda_available"] is torch.cuda.is_available()
    assert healthy["horovod"]["version"] == "0.28.1"
    assert healthy["problems"] == []


def test_every_operation_is_tried_over_each_controller(healthy: dict[str, Any]) -> None:
    for name, controller in healthy["controllers"].items():
        assert controller["works"] or not healthy["horovod"][name], controller["reason"]
        if controller["works"]:
            assert controller["operations"]["cpu"] == dict.fromkeys(OPERATIONS, "ok")


def test_settings_that_matter_are_shown_and_secrets_are_not(healthy: dict[str, Any]) -> None:
    assert healthy["environment"]["HOROVOD_CYCLE_TIME"] == "2"
    assert healthy["environment"]["OMP_NUM_THREADS"] == "1"
    assert "hush" not in json.dumps(healthy)


def test_the_table_says_the_same(healthy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_table(healthy)
    shown = capsys.readouterr().out
    for text in (
        "Python",
        healthy["torch"]["version"],
        "0.28.1",
        "gloo",
        "mpi",
        "Apex",
        "HOROVOD_CYCLE_TIME=2",
        "OMPI_MCA_plm_rsh_agent",
    ):
        assert text in shown
    assert "problem" not in shown


def write_package(folder: Path, name: str, text: str = "") -> None:
    path = folder / name.replace(".", "/")
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(text)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("mpi_lib_v2.so: undefined symbol: _ZN5torch3jit", ("does not load", "undefined symbol")),
        ("Extension horovod.torch has not been built: no such file", ("built without PyTorch",)),
    ],
    ids=["for another PyTorch", "without PyTorch"],
)
def test_a_broken_horovod(tmp_path: Path, error: str, words: tuple[str, ...]) -> None:
    write_package(tmp_path, "horovod")
    write_package(tmp_path, "horovod.torch", f"raise ImportError({error!r})")
    result = call(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    for word in (*words, "problem:", "hvd-ckpt build-horovod"):
        assert word in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_no_horovod() -> None:
    result = call("--json", before="sys.modules['horovod'] = None")
    facts = json.loads(result.stdout)
    assert result.returncode == 1
    assert facts["problems"][0].startswith("Horovod is not installed: run `hvd-ckpt build-horovod`")


def test_what_a_build_of_horovod_lacks(tmp_path: Path) -> None:
    """And how the last one failed: the first error in its log."""
    from hvd_ckpt.install.recipe import detect_target

    log = tmp_path / "hvd_ckpt" / "logs" / f"{detect_target().key}.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "[1/2] c++ a.cc\n  a.cc:3:1: error: one today\n  b.cc:1:1: error: two\nerror: subprocess-exited-with-error\n"
    )
    absent = "sys.modules['horovod'] = None"
    result = call("--json", before=absent, CXX="/no/such/compiler", XDG_CACHE_HOME=str(tmp_path))
    problems = json.loads(result.stdout)["problems"]
    assert result.returncode == 1
    assert any("CXX=/no/such/compiler" in problem for problem in problems)
    assert any("a.cc:3:1: error: one today" in problem and str(log) in problem for problem in problems)


@pytest.mark.parametrize("home", ["/proc/no/home", None])
def test_no_home(home: str | None) -> None:
    """horovodrun writes to ~/.horovod. A user that the password file does not know, without HOME, has none."""
    before = "import os\nfrom unittest.mock import patch\nsys.modules['horovod'] = None\n"
    before += "patch('pwd.getpwuid', side_effect=KeyError).start()\n"
    before += "os.environ.pop('HOME')" if home is None else f"os.environ['HOME'] = {home!r}"
    facts = json.loads(call("--json", before=before).stdout)
    (problem,) = [problem for problem in facts["problems"] if "HOME" in problem]
    assert "set HOME to a folder that you can write to" in problem and (home or "not set") in problem


def test_no_pytorch() -> None:
    result = call(before="sys.modules['torch'] = None")
    assert result.returncode == 1
    assert "problem: PyTorch does not load" in result.stdout


def test_a_controller_that_does_not_answer_in_time() -> None:
    result = call("--json", "--timeout", "1")
    facts = json.loads(result.stdout)
    assert result.returncode == 1
    assert "no controller works" in facts["problems"][0]
    for controller in facts["controllers"].values():
        assert not controller["works"]
        assert "within 1 seconds" in controller["reason"] or "without it" in controller["reason"]


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
        (["apex"], "another project of that name"),
        (["apex", "apex.normalization"], "went after 25.05"),
        (["apex", "apex.amp", "apex.normalization"], "needs a CUDA device"),
    ],
    ids=["another project", "newer", "with amp"],
)
def test_the_three_packages_called_apex(other_apex: Path, packages: list[str], words: str) -> None:
    import torch

    for package in packages:
        write_package(other_apex, package)
    facts = doctor.apex_facts()
    if "apex.amp" in packages and torch.cuda.is_available():
        assert facts["usable"]
    else:
        assert not facts["usable"]
        assert words in facts["reason"]
