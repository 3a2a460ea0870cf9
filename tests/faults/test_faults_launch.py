"""A run that is killed, processes that are killed within a save, and resumes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults import kill, resumes, save
from faults.kill import FaultPlan, Kill
from notes import Note

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("layout", "who", "when"),
    [("ranks", "all ranks", "step"), ("stages", "rank 1", "snapshot"), ("elastic", "rank 1", "step")],
)
def test_a_killed_run_ends_as_the_undisturbed_one(layout: str, who: str, when: str) -> None:
    (note,) = kill.check(FaultPlan(9, 2, "gloo", layout, (Kill(who, "SIGKILL", when, 20, 0.0),)))
    assert isinstance(note, Note) and "1 kills" in note


def test_killed_saves_leave_a_good_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "SERIES", 2)
    (note,) = save.check(8)
    assert isinstance(note, Note)


def test_jobs_of_other_layouts_resume_with_the_same_bits() -> None:
    """Some that are drawn, some in parts of layers, and some with averaged weights."""
    one, two = {"ranks": 1}, {"ranks": 2, "tensor": 2}
    staged = {"ranks": 4, "stages": 2, "tensor": 2}
    sequence = {**staged, "sequence": True}
    gradients, parameters = ({"ranks": 4, "tensor": 2, "shard": stage} for stage in (2, 3))
    in_parts = (two, one), (two, staged), (parameters, two), (parameters, parameters), (one, gradients)
    layouts = [(*pair, False) for pair in (*in_parts, (sequence, sequence), (sequence, one))]
    layouts += [
        ({"ranks": 2, "shard": there}, {"ranks": 2, "shard": here}, True) for there, here in ((0, 3), (2, 1))
    ]
    pairs = [
        {
            "optimizer": "AdamW",
            "dtype": "float32",
            "tied": False,
            "there": there,
            "here": here,
            "average": average,
        }
        for there, here, average in layouts
    ]
    drawn = resumes.draw(1, 0, "")[:4]
    assert [text for text in resumes.check([*drawn, *pairs]) if not isinstance(text, Note)] == []
