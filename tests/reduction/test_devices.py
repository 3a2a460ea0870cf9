"""Tests of parameters on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.processes import devices

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))


class OnGpu(torch.nn.Parameter):
    is_cuda = True
    device = torch.device("cuda", 1)


def test_a_horovod_without_operations_on_gpus_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod itself would wait forever."""
    monkeypatch.setattr(devices.hvd, "cuda_built", lambda: False)
    monkeypatch.setattr(devices.hvd, "rocm_built", lambda: False)
    weight = OnGpu(torch.zeros(2))
    named, sgd = [("weight", weight)], torch.optim.SGD([weight], lr=0.1)
    calls: dict[str, Callable[[], object]] = {
        "weight": lambda: hc.DistributedOptimizer(sgd, named),
        "'weight'": lambda: hc.LocalSGD(sgd, named),
        "weight'": lambda: hc.broadcast_parameters(named, root_rank=0),
        "group 0": lambda: hc.broadcast_optimizer_state(sgd, root_rank=0),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}.*cuda:1.*build-horovod"):
            call()


def test_parameters_on_another_gpu_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.warns(UserWarning, match=r"cuda:1.*cuda:0"):
        devices.check_devices([("weight", OnGpu(torch.zeros(2)))])


def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    """The receiver has another GPU, or none."""
    value = [OnGpu(torch.full((2,), float(hc.rank()))), {"rank": hc.rank()}]
    for rank, (tensor, rest) in enumerate(hc.allgather_object(value)):
        assert isinstance(tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_cuda
        assert tensor.requires_grad and tensor.tolist() == [rank, rank] and rest == {"rank": rank}
    tensor, _ = hc.broadcast_object(value, root_rank=0)
    assert tensor.tolist() == [0, 0] and (hc.rank() == 0 or tensor.device.type == "cpu")
