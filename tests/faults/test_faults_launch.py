"""A run that is killed, processes that are killed within a save, and resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults import kill, resumes, save
from faults.kill import FaultPlan, Kill
from notes import Note

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("layout", "who", "when"),
    [
        ("ranks", "all ranks", "step"),
        ("stages", "rank 1", "snapshot"),
        ("elastic", "rank 1", "step"),
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(layout: str, who: str, when: str) -> None:
    (note,) = kill.check(FaultPlan(9, 2, "gloo", layout, (Kill(who, "SIGKILL", when, 20, 0.0),)))
    assert isinstance(note, Note) and "1 kills" in note


def test_killed_saves_leave_a_good_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "SERIES", 2)
    (note,) = save.check(8)
    assert isinstance(note, Note)


PARTS: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2, "tensor": 2},
    {"ranks": 4, "stages": 2, "tensor": 2},
    {"ranks": 4, "stages": 2, "tensor": 2, "sequence": True},
    {"ranks": 4, "tensor": 2, "shard": 3},
    {"ranks": 4, "tensor": 2, "shard": 2},
]


def test_jobs_of_other_layouts_resume_with_the_same_bits() -> None:
    """Some that are drawn, some in parts of layers, and some with averaged weights."""
    drawn = resumes.draw(1, 0, "")[:4]
    one, two, staged, sequence, parameters, gradients = PARTS
    pairs = (two, one), (two, staged), (parameters, two), (parameters, parameters), (one, gradients)
    common = {"optimizer": "AdamW", "average": False, "dtype": "float32", "tied": False}
    in_parts = [
        {**common, "there": there, "here": here}
        for there, here in (*pairs, (sequence, sequence), (sequence, one))
    ]
    in_parts += [
        {
            **common,
            "average": True,
            "there": {"ranks": 2, "shard": there},
            "here": {"ranks": 2, "shard": here},
        }
        for there, here in ((0, 3), (2, 1))
    ]
    assert [text for text in resumes.check([*drawn, *in_parts]) if not isinstance(text, Note)] == []
