"""Tests of the choice of a GPU by each process, on a machine with simulated GPUs."""

from __future__ import annotations

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.model import device_of
from hvd_ckpt.processes import devices
from hvd_ckpt.processes.grid import Grid


class Gpus:
    """GPUs that this process sees, and its place among the processes of its host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen: list[torch.device] = []
        self._patch = monkeypatch.setattr
        self._patch(torch.cuda, "set_device", self.chosen.append)
        self._patch(devices.hvd, "rocm_built", lambda: False)
        self.show(0)

    def show(self, visible: int, local_rank: int = 0, built: bool = True, nccl: bool = True) -> None:
        self._patch(torch.cuda, "is_available", lambda: visible > 0)
        self._patch(torch.cuda, "device_count", lambda: visible)
        self._patch(devices.hvd, "cuda_built", lambda: built)
        self._patch(devices.hvd, "nccl_built", lambda: 22907 if built and nccl else 0)
        # Of two stages with two replicas; Horovod's local rank would be that within the stage.
        self._patch(devices, "current", lambda: Grid(2, 2, *divmod(local_rank, 2), local_rank, 4))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_processes_of_a_host_take_its_gpus_in_order(gpus: Gpus) -> None:
    for rank in range(4):
        gpus.show(4, rank)
        assert hc.local_device() == device_of(Config("gpt-tiny")) == torch.device("cuda", rank)
        assert device_of(Config("gpt-tiny", device="cuda")) == torch.device("cuda", rank)
        assert gpus.chosen[-1] == torch.device("cuda", rank)
    gpus.show(4, 2)
    assert device_of(Config("gpt-tiny", device="cuda:1")) == gpus.chosen[-1] == torch.device("cuda", 1)


def test_a_process_that_sees_one_gpu_takes_it(gpus: Gpus) -> None:
    gpus.show(1, 3)
    assert hc.local_device() == device_of(Config("gpt-tiny")) == torch.device("cuda", 0)


def test_more_processes_than_gpus_are_an_error(gpus: Gpus) -> None:
    gpus.show(2, 3)
    with pytest.raises(RuntimeError, match=r"process 3 .* 2 are visible"):
        hc.local_device()
    with pytest.raises(ConfigError, match="process 3"):
        device_of(Config("gpt-tiny"))
    with pytest.raises(ConfigError, match="cuda:2"):
        device_of(Config("gpt-tiny", device="cuda:2"))
    gpus.show(2, 3, nccl=False)  # which alone wants one for each process
    assert hc.local_device() == torch.device("cuda", 1)


def test_the_cpu_is_used_without_gpus_or_without_operations_on_them(gpus: Gpus) -> None:
    assert hc.local_device() == device_of(Config("gpt-tiny")) == torch.device("cpu")
    gpus.show(4, built=False)
    with pytest.warns(UserWarning, match="build-horovod"):
        assert hc.local_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device 'cuda:1'.*build-horovod"):
        device_of(Config("gpt-tiny", device="cuda:1"))
    assert not gpus.chosen
