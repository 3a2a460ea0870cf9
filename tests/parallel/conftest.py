"""Tests in this folder run once on every rank: ``horovodrun -np 2 python -m pytest tests/parallel``.

All ranks run the same tests in the same order. A failure ends the session at once (``-x``): the other ranks could otherwise wait in
a collective that never comes.
"""
from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch

import hvd_ckpt as hc

HANG_SECONDS = 120


def pytest_configure(config: pytest.Config) -> None:
    config.option.maxfail = 1
    hc.init()
    if hc.rank() != 0:
        config.option.verbose = -1


@pytest.fixture(autouse=True)
def _in_step_with_the_others() -> Iterator[None]:
    """Starts every test from the same random state, in step, and dumps all stacks if it hangs."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    torch.manual_seed(1234)
    hc.barrier()
    yield
    hc.barrier()
    faulthandler.cancel_dump_traceback_later()
