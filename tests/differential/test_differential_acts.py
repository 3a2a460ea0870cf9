"""Some random programs in which users act by hand; `python tests/seeds.py acts` runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvd_ckpt as hc

sys.path.append(str(Path(__file__).resolve().parent))
from checking_acts import check
from drawing_acts import draw

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(3,))


@pytest.mark.parametrize("seed", range(16))
def test_acts_by_hand(seed: int) -> None:
    assert check(draw(seed, hc.size())) == []
