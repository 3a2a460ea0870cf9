"""Offload of optimizer state beside a device: synchronization, waits and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from streams import DEVICE, Simulation, check, simulated
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.offload.shards import Offload

SIZES = (1000, 1001, 1002, 1003, 1004, 1005)


class Job:
    """Parameters on the device, whose optimizer may be offloaded."""

    def __init__(self, make: Any = torch.optim.Adam, sizes: Any = SIZES, offloaded: bool = True) -> None:
        self.parameters = [nn.Parameter(torch.ones(size, device=DEVICE)) for size in sizes]
        self.optimizer = make(self.parameters, lr=0.1)
        self.offload = Offload(None, DEVICE)
        self._offloaded = offloaded

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = parameter.detach() * 0.5
        if self._offloaded:
            self.offload.step(self.optimizer, lambda: type(self.optimizer).step(self.optimizer))
        else:
            self.optimizer.step()

    def read_state(self) -> None:
        """As a snapshot does, on the host."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    float(value.sum())


def steps(simulation: Simulation) -> None:
    job = Job()
    for _ in range(3):
        job.step()
        job.read_state()


def loads(simulation: Simulation) -> None:
    job = Job(lambda own, lr: torch.optim.SGD(own, lr=lr, momentum=0.9))
    for parameter in job.parameters:
        job.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    job.offload.move_state(job.optimizer)
    job.read_state()
    job.step()
    job.read_state()


def test_every_synchronization_is_needed() -> None:
    assert len(check(steps, loads)) > 5


def test_a_step_has_the_same_numbers_and_the_host_waits_once() -> None:
    with simulated() as simulation:
        job, plain = Job(), Job(offloaded=False)
        for _ in range(3):
            simulation.waits.clear()
            job.step()
            plain.step()
        assert len(simulation.waits) == 1
        assert all(map(torch.equal, job.parameters, plain.parameters))


def test_host_memory_is_not_rounded_up() -> None:
    with simulated() as simulation:
        job = Job(sizes=(1 << 20,) * 3)
        job.step()
        locked = sum(end - start for start, end in simulation._page_locked.items())
        assert locked == job.offload.bytes == 2 * 3 * 4 << 20


@pytest.mark.parametrize("parts", [4, 16])
def test_the_device_takes_what_is_estimated(parts: int) -> None:
    """However many parameters there are, and however far ahead the host is."""
    size = 1 << 16
    with simulated() as simulation:
        model = nn.ParameterList([nn.Parameter(torch.ones(size, device=DEVICE)) for _ in range(parts)])
        optimizer = torch.optim.Adam(model.parameters())
        shard = hc.Shard("optimizer", offload="optimizer")
        estimate = hc.estimate_memory(model, 1, shard, optimizer=optimizer)
        del model, optimizer
        before = simulation.allocator.allocated
        job = Job(sizes=(size,) * parts)
        for _ in range(3):  # the first makes the state
            simulation.allocator.restart()
            job.step()
        assert simulation.allocator.reserved - before == pytest.approx(estimate.peak, rel=0.02)
        assert estimate.peak_phase == "step"
