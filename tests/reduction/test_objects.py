"""Tests of Python objects between ranks: any value of any type on any rank, and errors on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))


@pytest.mark.parametrize("name", [None, "objects"])
def test_the_ranks_values_need_not_be_of_one_type(name: str | None) -> None:
    value: Any = {"rank": 0} if hc.rank() == 0 else None
    assert hc.broadcast_object(value, 0, name) == {"rank": 0}
    values = [1, "one", None, lambda: 1][: hc.size()]
    gathered = hc.allgather_object(values[hc.rank()], name)
    assert gathered[:3] == values[:3]
    assert all(call() == 1 for call in gathered[3:])
    last = hc.size() - 1
    assert hc.broadcast_object([hc.rank()], root_rank=last, name=name) == [last]


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
def test_a_value_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    broken: Any = threading.Lock() if hc.rank() == 1 else 1
    message = "cannot pickle" if hc.rank() == 1 else "rank 1: .*cannot pickle"
    for send in (lambda: hc.broadcast_object(broken, 1), lambda: hc.allgather_object(broken)):
        with pytest.raises((TypeError, ValueError), match=message):
            send()
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


@pytest.mark.ranks(mpi=(4,))
def test_a_process_set_has_a_root_of_its_own() -> None:
    members = hc.add_process_set([0, 2])
    try:
        if members.included():
            assert hc.broadcast_object(hc.rank() if hc.rank() else "root", 2, process_set=members) == 2
    finally:
        hc.remove_process_set(members)
