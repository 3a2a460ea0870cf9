"""Some hostile inputs of all kinds, in a process that watches itself and whose memory is limited."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from seeds import KINDS, Job


def test_hostile_inputs_end_in_one_line_and_change_nothing() -> None:
    found = Job("fuzz", 1, 1, "gloo", KINDS["fuzz"].seconds).run(range(17))
    assert not found.failures and len(found.done) == 17
