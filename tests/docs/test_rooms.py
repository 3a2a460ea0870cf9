"""The picture of the rooms shows the imports of the code as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_rooms.py"))["draw"]()
    assert (DOCS / "rooms.svg").read_text(encoding="utf-8") == drawn, "run python docs/draw_rooms.py"
