"""Starting Horovod on every rank: threads, the controller, and MPI's communicator beside Horovod's."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from horovod.torch import mpi_ops

import hvd_ckpt as hc
from hvd_ckpt.processes import runtime

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))


def test_second_init_changes_nothing() -> None:
    for _ in range(2):
        assert all(hc.allgather_object(os.environ.get("HOROVOD_FUSION_THRESHOLD") == "0"))
        assert runtime.repeatable()
        if "OMP_NUM_THREADS" not in os.environ:
            assert torch.get_num_threads() == max(1, runtime.allowed_cpus() // hc.local_size())
        assert set(hc.allgather_object(hc.controller())) == {"mpi" if hc.mpi_enabled() else "gloo"}
        hc.init()


def test_mpi_communicator_has_horovods_ranks() -> None:
    if hc.controller() == "gloo":
        with pytest.raises(RuntimeError, match="horovodrun --mpi"):
            hc.mpi_communicator()
        return
    comm = hc.mpi_communicator()
    assert (comm.Get_rank(), comm.Get_size()) == (hc.rank(), hc.size())
    handle = hc.allreduce_async(torch.full((1000,), float(hc.rank())), op=hc.Sum, name="beside.mpi")
    assert comm.allreduce(hc.rank()) == sum(range(hc.size()))
    assert hc.synchronize(handle)[0].item() == sum(range(hc.size()))
    assert hc.mpi_communicator() is comm


def test_messages_do_not_wait_for_python() -> None:
    """Horovod's thread needs nothing of the interpreter, whose lock this one keeps until all messages are through."""
    rows, large = torch.ones(4 * hc.size(), 2), torch.ones(1 << 23)
    kinds = {
        "allreduce": lambda name: hc.allreduce_async_(rows.clone(), name=name),
        "several": lambda name: hc.grouped_allreduce_async_([rows.clone(), rows.clone()], name=name),
        "broadcast": lambda name: hc.broadcast_async_(rows.clone(), root_rank=0, name=name),
        "allgather": lambda name: hc.allgather_async(rows.clone(), name=name),
        "gathered": lambda name: hc.grouped_allgather_async([rows.clone(), rows.clone()], name=name),
        "alltoall": lambda name: hc.alltoall_async(rows.clone(), name=name),
        "reducescatter": lambda name: hc.reducescatter_async(rows.clone(), name=name),
        "scattered": lambda name: hc.grouped_reducescatter_async([rows.clone(), rows.clone()], name=name),
    }
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        handles = [hc.allreduce_async_(large, name="beside.python")]  # which the others wait for
        handles += [
            begin(f"beside.python.{kind}.{number}") for number in "abc" for kind, begin in kinds.items()
        ]
        end = time.monotonic() + 30
        through = False
        while not through and time.monotonic() < end:
            through = all(mpi_ops.poll(handle) for handle in handles)
    finally:
        sys.setswitchinterval(interval)
    results = [hc.synchronize(handle) for handle in handles]
    assert through
    assert torch.equal(results[4], torch.ones(4 * hc.size() ** 2, 2))
    assert all(torch.equal(part, results[4]) for part in results[5])
    assert torch.equal(results[6][0], rows) and torch.equal(results[7], torch.ones(4, 2))
