"""Programs of :mod:`named`: they end as in one process, at every stage, and however they are recomputed or resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
from checking import check, resumes
from named import NAMED, RESUMED

pytestmark = pytest.mark.ranks(gloo=(2,))


@pytest.mark.parametrize(
    ("name", "stage", "recompute"),
    [(name, stage, how) for name, one in NAMED.items() for stage in one.stages for how in one.recompute],
)
def test_ends_as_in_one_process(name: str, stage: int, recompute: str) -> None:
    assert check(NAMED[name].program(hc.size(), stage, recompute)) == []


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name, one in RESUMED.items() for stage in one.stages]
)
def test_resumed_after_every_step(name: str, stage: int) -> None:
    assert resumes(RESUMED[name].program(hc.size(), stage)) == []
