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
    """Parameters on the device, whose optimizer is offloaded."""

    def __init__(self, make: Any = torch.optim.Adam, sizes: Any = SIZES) -> None:
        self.parameters = [nn.Parameter(torch.ones(size, device=DEVICE)) for size in sizes]
        self.optimizer = make(self.parameters, lr=0.1)
        self.offload = Offload(None, DEVICE)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = parameter.detach() * 0.5
        self.offload.step(self.optimizer, lambda: type(self.optimizer).step(self.optimizer))

    def read_state(self) -> float:
        """As a snapshot does, on the host."""
        states = [state for state in self.optimizer.state.values() for state in state.values()]
        return sum(float(value.sum()) for value in states if isinstance(value, torch.Tensor))


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


def test_the_same_numbers_as_beside_the_weights() -> None:
    with simulated():
        job, plain = Job(), Job()
        for _ in range(3):
            job.step()
            for parameter in plain.parameters:
                parameter.grad = parameter.detach() * 0.5
            plain.optimizer.step()
        for one, other in zip(job.parameters, plain.parameters):
            assert torch.equal(one, other)


def test_the_host_waits_once_in_a_step() -> None:
    with simulated() as simulation:
        job = Job()
        job.step()
        simulation.waits.clear()
        job.step()
        assert len(simulation.waits) == 1


def test_host_memory_is_not_rounded_up() -> None:
    with simulated() as simulation:
        job = Job(sizes=(1 << 20,) * 3)
        job.step()
        locked = sum(end - start for start, end in simulation._page_locked.items())
        assert job.offload.bytes == 2 * 3 * 4 << 20
        assert locked == job.offload.bytes


@pytest.mark.parametrize("parts", [4, 16])
def test_the_device_takes_what_is_estimated(parts: int) -> None:
    """However many parameters there are, and however far ahead the host is."""
    size = 1 << 16
    with simulated() as simulation:
        model = nn.ParameterList([nn.Parameter(torch.ones(size, device=DEVICE)) for _ in range(parts)])
        optimizer = torch.optim.Adam(model.parameters())
        estimate = hc.estimate_memory(
            model, 1, hc.Shard("optimizer", offload="optimizer"), optimizer=optimizer
        )
        del model, optimizer
        before = simulation.allocator.allocated
        job = Job(sizes=(size,) * parts)
        job.step()  # makes the state
        job.step()
        simulation.allocator.restart()
        job.step()
        assert simulation.allocator.reserved - before == pytest.approx(estimate.peak, rel=0.02)
        assert estimate.peak_phase == "step"
