"""Tests of the race checker: it finds the orders that CUDA allows, and no others."""

from __future__ import annotations

import pytest
import torch
from alike_ranks import AlikeRanks
from horovod.torch import mpi_ops
from streams import DEVICE, Scenario, Simulation, own_stream, run, simulated

from hvd_ckpt.reduction.collectives import wait
from hvd_ckpt.sharding.host_memory import PinnedMemory


def on_two_streams(simulation: Simulation) -> None:
    tensor = torch.ones(8, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.add_(1)


def after_an_event(simulation: Simulation) -> None:
    tensor, other = torch.ones(8, device=DEVICE), torch.cuda.Stream()
    written = torch.cuda.current_stream().record_event()
    other.wait_event(written)
    with torch.cuda.stream(other):
        total = tensor.sum()
    total.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(other)
    tensor.add_(1)


def after_an_older_event(simulation: Simulation) -> None:
    tensor, other = torch.ones(8, device=DEVICE), torch.cuda.Stream()
    written = torch.cuda.current_stream().record_event()
    tensor.add_(1)
    other.wait_event(written)
    with torch.cuda.stream(other):
        tensor.sum()


def freed_in_use(simulation: Simulation) -> None:
    tensor, other = torch.ones(8, device=DEVICE), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        tensor.sum()


def used_as_soon_as_allocated(simulation: Simulation) -> None:
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.ones(8, device=DEVICE).sum()
    tensor = torch.empty(8, device=DEVICE)  # may be that memory
    with torch.cuda.stream(other):
        tensor.zero_()
    current.wait_stream(other)


def freed_and_recorded(simulation: Simulation) -> None:
    tensor, other = torch.ones(8, device=DEVICE), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        tensor.sum()
    tensor.record_stream(other)


def resized_in_use(simulation: Simulation) -> None:
    tensor, other = torch.ones(8, device=DEVICE), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        tensor.sum()
    tensor.untyped_storage().resize_(0)
    torch.cuda.synchronize()


def read_before_the_copy_is_over(simulation: Simulation) -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(torch.ones(8, device=DEVICE), non_blocking=True)
    host.sum()


def moved_to_pinned_memory(simulation: Simulation) -> None:
    torch.ones(8, device=DEVICE).to("cpu", non_blocking=True).sum()


def read_after_the_copy(simulation: Simulation) -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(torch.ones(8, device=DEVICE), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    host.sum()


def blocking(simulation: Simulation) -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(torch.ones(8, device=DEVICE)).sum()


def pinned_on_the_way(simulation: Simulation) -> None:
    host = torch.ones(8)
    host.pin_memory().to(DEVICE, non_blocking=True)
    host.add_(1)


def pageable(simulation: Simulation) -> None:
    host = torch.empty(8)
    host.copy_(torch.ones(8, device=DEVICE), non_blocking=True).sum()
    device = host.to(DEVICE, non_blocking=True)
    host.add_(1)
    device.cpu().sum()


def written_while_it_leaves(simulation: Simulation) -> None:
    host = torch.ones(8, pin_memory=True)
    host.to(DEVICE, non_blocking=True)
    host.add_(1)


def unlocked_in_use(simulation: Simulation) -> None:
    (host,) = PinnedMemory().allocate([(8, torch.float32)])
    host.to(DEVICE, non_blocking=True)


def written_while_it_is_reduced(simulation: Simulation) -> None:
    with AlikeRanks(simulation).running():
        tensor = torch.ones(8, device=DEVICE)
        handle = mpi_ops.allreduce_async_(tensor, name="sum", op=mpi_ops.Sum)
        tensor.add_(1)
        mpi_ops.synchronize(handle)


def result_used_on_another_stream(simulation: Simulation) -> None:
    with AlikeRanks(simulation).running() as ranks, own_stream():
        tensor = torch.ones(8, device=DEVICE)
        handle = mpi_ops.allgather_async(tensor, name="gather", process_set=ranks.process_set)
        mpi_ops.synchronize(handle).add_(1)


def reduced(simulation: Simulation) -> None:
    with AlikeRanks(simulation).running() as ranks, own_stream():
        tensor = torch.ones(8, device=DEVICE)
        handle = mpi_ops.allreduce_async_(tensor, name="sum", op=mpi_ops.Sum)
        assert mpi_ops.synchronize(handle).add_(1).tolist() == [3] * 8
        handle = mpi_ops.allgather_async(tensor, name="gather", process_set=ranks.process_set)
        wait(handle, "gather").add_(1)


def two_threads(simulation: Simulation) -> None:
    host = torch.ones(8)
    with simulation.thread("writer"):
        host.sum()
    host.add_(1)


def one_after_the_other(simulation: Simulation) -> None:
    host = torch.ones(8)
    with simulation.thread("writer"):
        host.sum()
    simulation.wait_for_thread("writer")
    host.add_(1)


RACES = [
    on_two_streams,
    after_an_older_event,
    freed_in_use,
    resized_in_use,
    used_as_soon_as_allocated,
    read_before_the_copy_is_over,
    moved_to_pinned_memory,
    written_while_it_leaves,
    unlocked_in_use,
    written_while_it_is_reduced,
    result_used_on_another_stream,
    two_threads,
]
NONE = [
    after_an_event,
    freed_and_recorded,
    read_after_the_copy,
    blocking,
    pinned_on_the_way,
    pageable,
    reduced,
    one_after_the_other,
]


@pytest.mark.parametrize("scenario", RACES)
def test_races_are_found(scenario: Scenario) -> None:
    assert run(scenario).races


@pytest.mark.parametrize("scenario", NONE)
def test_order_is_recognized(scenario: Scenario) -> None:
    assert not run(scenario).races


def test_tensors_say_where_they_are_and_compute() -> None:
    with simulated():
        one = torch.arange(4.0, device="cuda")
        assert one.is_cuda and one.device == DEVICE and (one + 1)[:2].is_cuda
        assert not one.cpu().is_cuda and one.to("cpu", torch.float64).dtype is torch.float64
        assert torch.empty_like(one, device="cpu", pin_memory=True).is_pinned()
        assert one.to(torch.float16).is_cuda and torch.zeros(3).to(one).is_cuda
        assert torch.nn.Linear(2, 2, device="cuda").weight.is_cuda
        assert torch.nn.Linear(2, 2).to("cuda").bias.is_cuda
        assert one.tolist() == [0, 1, 2, 3] and float(one.sum()) == 6


def test_memory_goes_back_to_its_stream() -> None:
    with simulated() as simulation:
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        for _ in range(3):
            torch.empty(100, dtype=torch.uint8, device="cuda")
        assert simulation.allocator.reserved == simulation.allocator.peak == 100
        with torch.cuda.stream(other):
            torch.empty(100, dtype=torch.uint8, device="cuda")
        assert (simulation.allocator.peak, simulation.allocator.reserved) == (100, 200)
        with torch.cuda.stream(other):
            used = torch.ones(1, dtype=torch.uint8, device="cuda")
        for _ in range(3):  # the host does not know that their uses are over
            block = torch.empty(100, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(other):
                used.add_(1)
            block.record_stream(other)
            del block
        assert simulation.allocator.reserved == 400
        other.synchronize()
        current.synchronize()
        for _ in range(3):
            torch.empty(100, dtype=torch.uint8, device="cuda")
        assert simulation.allocator.reserved == 400
