"""The picture of the rooms shows the imports of the code as they are, and the quick run has something of every room."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
CORE = ("distributed", "sharding", "planning", "reduction", "recompute", "batchnorm", "data", "utils")


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_rooms.py"))["draw"]()
    assert (DOCS / "rooms.svg").read_text(encoding="utf-8") == drawn, "run python docs/draw_rooms.py"


@pytest.mark.parametrize("room", CORE)
def test_the_core_reads_no_stages_and_parts(room: str) -> None:
    """It asks :mod:`hvd_ckpt.processes.whole_model`, and :mod:`hvd_ckpt.processes.grid` for values of all processes."""
    places = {"stage", "stages", "part", "tensor", "process", "peers", "link", "stage_link", "part_link"}
    for file in (ROOT / "hvd_ckpt" / room).rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        grids = {"current()", "grid()", "grid", "self._grid"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in places:
                assert ast.unparse(node.value) not in grids, f"{file}:{node.lineno}"


def test_the_quick_run_has_something_of_every_room() -> None:
    chosen = [TESTS.parent / line.split("::")[0] for line in (TESTS / "quick.txt").read_text("utf-8").split()]
    assert all(file.is_file() for file in chosen)
    assert {file.parent for file in TESTS.rglob("test_*.py")} == {file.parent for file in chosen}
