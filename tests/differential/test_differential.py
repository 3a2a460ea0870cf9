"""Some random programs of tests/differential; `python tests/differential/run.py --help` tells how to run more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
from checking import check
from programs import draw

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(2,))

SEEDS = {2: range(12), 3: range(100, 108)}  # of each number of ranks


@pytest.mark.parametrize("seed", SEEDS.get(hc.size(), ()))
def test_random_program(seed: int) -> None:
    assert check(draw(seed, hc.size())) == []
