"""What users do by hand, one act at a time and some at random; `python tests/seeds.py acts` runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
from checking_acts import check
from drawing_acts import draw
from named_acts import Case, cases, program

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(3,))


@pytest.mark.parametrize("seed", range(16))
def test_acts_by_hand(seed: int) -> None:
    assert check(draw(seed, hc.size())) == []


@pytest.mark.ranks(gloo=(2,))
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: "-".join(map(str, case)))
def test_one_act(case: Case) -> None:
    assert check(program(case, hc.size())) == []
