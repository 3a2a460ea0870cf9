"""The command behind `bash main.sh test`: its closing line and exit status, whatever happens to a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

RUN = Path(__file__).resolve().parents[1] / "run.py"


class Tree:
    """A repository with tests of its own and this one's tests/run.py."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tests").mkdir(parents=True)
        for name in ("run.py", "conftest.py"):
            shutil.copy(RUN.with_name(name), root / "tests")
        markers = (
            "[tool:pytest]\naddopts = --import-mode=importlib\nmarkers =\n    launch\n    hosts\n    ranks\n"
        )
        (root / "setup.cfg").write_text(markers)

    def write(self, name: str, text: str) -> None:
        path = self.root / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def run(self, *arguments: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, str(self.root / "tests" / "run.py"), *arguments],
            cwd=self.root,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return result.returncode, result.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "a tree")


LAUNCHED = "import pytest\npytestmark = pytest.mark.launch\ndef test_right(): pass\n"
MIXED = """
import pytest
def test_right(): pass
def test_wrong(): assert "seen" == "not seen"
def test_left_out(): pytest.skip("no reason")
"""


def test_all_runs_are_summed(tree: Tree) -> None:
    tree.write("room/test_mixed.py", MIXED)
    tree.write("room/test_launched.py", LAUNCHED)
    status, output = tree.run()
    assert status == 1
    assert output.splitlines()[-1] == "2 passed, 1 failed, 1 skipped"
    assert 'assert "seen"' in output or "assert 'seen'" in output


def test_success_is_exit_status_0(tree: Tree) -> None:
    tree.write("room/test_right.py", "def test_right(): pass")
    status, output = tree.run()
    assert (status, output.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")


def test_a_crash_counts_as_a_failure(tree: Tree) -> None:
    tree.write("room/test_crash.py", "import os\ndef test_crash(): os._exit(0)")
    tree.write("room/test_launched.py", LAUNCHED)
    status, output = tree.run()
    assert (status, output.splitlines()[-1]) == (1, "1 passed, 1 failed, 0 skipped")
    assert "before it could report" in output


def test_no_test_at_all_is_no_success(tree: Tree) -> None:
    tree.write("room/test_right.py", "def test_right(): pass")
    status, output = tree.run("-k", "nothing_of_this_name")
    assert (status, output.splitlines()[-1]) == (1, "0 passed, 0 failed, 0 skipped")


def test_paths_choose_the_tests(tree: Tree) -> None:
    tree.write("room/test_mixed.py", MIXED)
    tree.write("room/test_launched.py", LAUNCHED + "def test_also(): pass\n")
    status, output = tree.run("tests/room/test_launched.py::test_also", "-q")
    assert (status, output.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    assert "one process" not in output


def test_a_failure_on_one_rank_is_a_failure(tree: Tree) -> None:
    tree.write(
        "room/test_rank.py",
        "import os, pytest\npytestmark = pytest.mark.ranks(gloo=(2,))\n"
        "def test_everywhere(): pass\n"
        "def test_not_on_rank_1(): assert os.environ['HOROVOD_RANK'] != '1'\n",
    )
    status, output = tree.run()
    assert (status, output.splitlines()[-1]) == (1, "1 passed, 1 failed, 0 skipped")
