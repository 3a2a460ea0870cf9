"""Some random programs of tests/differential; `python tests/seeds.py core` runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
from checking import check
from drawing import draw

pytestmark = pytest.mark.ranks(gloo=(1, 3), mpi=(2,))

# By number of ranks; chosen so that few programs have most of the kinds of models, recomputation, options and events.
SEEDS = {
    1: [155, 179, 135],
    2: [3033, 3042, 3008, 3056, 3053, 3029],
    3: [520, 523, 526],
}


@pytest.mark.parametrize("seed", SEEDS.get(hc.size(), ()))
def test_random_program(seed: int) -> None:
    assert check(draw(seed, hc.size())) == []
