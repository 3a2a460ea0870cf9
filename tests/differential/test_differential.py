"""Programs that must end as in one process, at every stage, and however they are recomputed or resumed: random ones, those of
:mod:`named`, and those in which users act by hand. `python tests/seeds.py core` (or acts) runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
import checking_acts
import drawing_acts
import named_acts
from checking import check, resumes
from drawing import draw
from named import NAMED, RESUMED

# By number of ranks; chosen so that few programs have most of the kinds of models, recomputation, options and events.
SEEDS = {1: [314, 228, 147], 2: [90, 137, 0, 173, 317, 5], 3: [558, 352, 66]}


@pytest.mark.ranks(gloo=(1, 3), mpi=(2,))
@pytest.mark.parametrize("seed", SEEDS.get(hc.size(), ()))
def test_random_program(seed: int) -> None:
    assert check(draw(seed, hc.size())) == []


@pytest.mark.ranks(gloo=(2,))
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


@pytest.mark.ranks(gloo=(2,), mpi=(3,))
@pytest.mark.parametrize("seed", range(16))
def test_acts_by_hand(seed: int) -> None:
    assert checking_acts.check(drawing_acts.draw(seed, hc.size())) == []


@pytest.mark.ranks(gloo=(1, 2))
@pytest.mark.parametrize(
    "case", list(named_acts.cases())[:: 6 if hc.size() == 1 else 1], ids=lambda case: "-".join(map(str, case))
)
def test_one_act(case: named_acts.Case) -> None:
    assert checking_acts.check(named_acts.program(case, hc.size())) == []
