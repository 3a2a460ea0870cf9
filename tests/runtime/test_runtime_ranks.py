"""Starting Horovod on every rank: threads, the controller, and MPI's communicator beside Horovod's."""

from __future__ import annotations

import os

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt import runtime

pytestmark = pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2, 4))


def test_every_rank_has_its_share_of_the_cpus() -> None:
    if "OMP_NUM_THREADS" in os.environ:
        pytest.skip("OMP_NUM_THREADS chooses the threads here")
    assert torch.get_num_threads() == max(1, runtime.allowed_cpus() // hc.local_size())


def test_fusion_is_off_everywhere() -> None:
    assert all(hc.allgather_object(os.environ.get("HOROVOD_FUSION_THRESHOLD") == "0"))
    assert runtime.repeatable()


def test_a_second_init_changes_nothing() -> None:
    before = runtime.process_facts()
    hc.init()
    assert runtime.process_facts() == before
    # Named: Horovod numbers unnamed tensors, and ranks that joined earlier have counted fewer.
    assert hc.allreduce(torch.ones(1), op=hc.Sum, name="second.init").item() == hc.size()


def test_the_controller_is_the_same_everywhere() -> None:
    names = hc.allgather_object(hc.controller())
    assert set(names) == {"mpi" if hc.mpi_enabled() else "gloo"}


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
