"""The picture of the rooms shows the imports of the code as they are, and the quick run has something of every room."""

from __future__ import annotations

import runpy
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_rooms.py"))["draw"]()
    assert (DOCS / "rooms.svg").read_text(encoding="utf-8") == drawn, "run python docs/draw_rooms.py"


def test_the_quick_run_has_something_of_every_room() -> None:
    chosen = [TESTS.parent / line.split("::")[0] for line in (TESTS / "quick.txt").read_text("utf-8").split()]
    assert all(file.is_file() for file in chosen)
    assert {file.parent for file in TESTS.rglob("test_*.py")} == {file.parent for file in chosen}
