"""Starting Horovod on every rank: threads, the controller, and MPI's communicator beside Horovod's."""

from __future__ import annotations

import os

import pytest
import torch

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
