"""Messages of stages and sums of parts over NCCL: streams, the order in which receives are launched, and a process that ends."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopback import Loopback
from streams import DEVICE, Simulation, Stream, Work, check, run, simulated
from torch.distributed import HashStore

from hvd_ckpt.parallel.pipeline.transport import Transport
from hvd_ckpt.processes import device_link, parts, watchdog
from hvd_ckpt.processes.grid import Grid, pretending
from hvd_ckpt.processes.hosts import Peer
from hvd_ckpt.processes.links import StageFailed

OTHER, TAG = 1, 20


class Nccl:
    """Stands for ``ProcessGroupNCCL``, where the other process does what this one does.

    It begins after the current stream and runs on a stream of its own. Messages of one size arrive in the order in which they were
    sent, and whoever receives in another order gets wrong values.
    """

    supports_coalescing = True
    simulation: Simulation

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options.config.min_ctas == options.config.max_ctas > 0
        self.stream = Stream(self.simulation, f"NCCL's stream {len(groups)}")
        self.aborted = False
        groups.append(self)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self._use(tensors[0], write=False)
        arrived.append(tensors[0].clone())
        return Work(self.stream)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        (memory,) = tensors
        self._use(memory, write=True)
        received.append(memory)
        if arrived:
            self._fill()
        return Work(self.stream)

    def _fill(self) -> None:
        memory, sent = received.popleft(), arrived.popleft()
        ctypes.memmove(memory.data_ptr(), sent.data_ptr(), memory.nbytes)

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work:
        while received and arrived:
            self._fill()
        return Work(self.stream)

    def abort(self) -> None:
        self.aborted = True

    def _use(self, memory: torch.Tensor, write: bool) -> None:
        simulation = self.simulation
        simulation.join(self.stream.name, simulation.stream.clock())
        time = simulation.launch(self.stream.name)
        simulation.access(memory, self.stream.name, time, "a message", write)


groups: list[Nccl] = []
arrived: deque[torch.Tensor] = deque()
received: deque[torch.Tensor] = deque()


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    yield
    watchdog.look_every_second()


def grid_of(simulation: Simulation, stages: int, tensor: int) -> Grid:
    for left in (groups, arrived, received):
        left.clear()
    Nccl.simulation = simulation
    peers = [Peer.here(number) for number in range(stages * tensor)]
    grid = Grid(stages, 1, 0, 0, tensor=tensor, peers=peers, backend="nccl", store=HashStore())
    grid.link = Loopback(simulation)
    device_link.add_links(grid)
    return grid


def open_transport(simulation: Simulation, tensor: int = 1) -> Transport:
    transport = Transport(grid_of(simulation, 2, tensor))
    transport.open_lanes([(0, 1)], [torch.ones(1, device=DEVICE)])
    return transport


def values(number: float) -> torch.Tensor:
    return torch.ones(64, device=DEVICE).mul_(number)


def received_from(transport: Transport, source: int, tag: int) -> torch.Tensor:
    (there,) = transport.receive(source, tag, "the input").tensors
    return there


def messages(simulation: Simulation) -> None:
    """Values that are overwritten when they have been sent; the last has another shape."""
    transport = open_transport(simulation)
    for number in range(4):
        value = values(number)[: 64 if number < 3 else 32]
        transport.send(value, OTHER, TAG)
        there = received_from(transport, OTHER, TAG)
        assert torch.equal(there.add_(1), value + 1)
        there.mul_(2)  # and is freed
        transport.flush()
        value.zero_()


def sums(simulation: Simulation) -> None:
    with pretending(grid_of(simulation, 1, 2)):
        own = values(3)
        total = parts.add(own)
        own.zero_()
        assert total.tolist() == [6] * 64


def sums_between_messages(simulation: Simulation) -> None:
    transport = open_transport(simulation, tensor=2)
    with pretending(transport.grid):
        for number in range(2):
            transport.send(values(number), 2, TAG)
            there = received_from(transport, 2, TAG)
            transport.send(parts.add(there), 2, TAG + 1)
            back = received_from(transport, 2, TAG + 1)
            assert back.tolist() == [2 * number] * 64
        transport.flush()


def test_every_synchronization_is_needed() -> None:
    assert len(check(messages, sums, sums_between_messages)) == 5


def test_the_host_waits_for_no_device_in_a_pass() -> None:
    for scenario in (messages, sums_between_messages):
        assert not run(scenario).waits


def test_receives_are_launched_in_the_order_of_sends() -> None:
    with simulated() as simulation:
        transport = open_transport(simulation)
        for number in range(3):
            transport.send(values(number), OTHER, TAG + number)
        for number in (2, 0, 1):
            assert received_from(transport, OTHER, TAG + number).tolist() == [number] * 64
        transport.flush()


def test_messages_and_sums_wait_for_no_stream_of_each_other() -> None:
    with simulated() as simulation:
        transport = open_transport(simulation, tensor=2)
        with pretending(transport.grid):
            parts.add(values(1))
            sending, receiving, adding = (group.stream.name for group in groups)
            before = dict(simulation.clock(receiving))
            transport.send(values(1), 2, TAG)
            transport.send(values(1), 2, TAG + 1)
            received_from(transport, 2, TAG + 1)  # the other one is launched, too, and nobody waits for it
            parts.add(values(1))
            after = simulation.clock(receiving)
        assert simulation.clock(adding).get(sending, 0) < simulation.clock(sending)[sending]
        assert after.get(adding, 0) == before.get(adding, 0)
        assert after[receiving] > before[receiving]


# -------------------------------------------------------------------------------------- a process that ends


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks that have ended. A second passes from one look to the next."""
    ranks, seconds = set[int](), itertools.count(1)
    monkeypatch.setattr(watchdog, "now", lambda: float(next(seconds)))
    monkeypatch.setattr(Peer, "has_ended", lambda peer: peer.rank in ranks)
    return ranks


def test_a_process_that_ends_aborts_messages_and_is_named(ended: set[int]) -> None:
    with simulated() as simulation:
        transport = open_transport(simulation)
        link: Any = transport.grid.stage_link
        transport.send(values(1), OTHER, TAG)
        for _ in range(4):
            wait = link.look()
            assert wait is not None and "stage 1 (rank 1" in wait.what
        assert not any(group.aborted for group in groups)
        ended.add(1)
        link.look()
        assert all(group.aborted for group in groups)
        with pytest.raises(StageFailed, match=r"stage 1 \(rank 1 on host \S+\) has ended"):
            transport.flush()


@pytest.mark.parametrize("is_here", [True, False])
def test_an_aborted_message_that_nobody_asks_for_ends_the_process(
    is_here: bool, ended: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a process that may be on another machine, where nobody can look for it."""
    said: list[str] = []
    monkeypatch.setattr(watchdog, "end", said.append)
    ended.add(1)
    with simulated() as simulation:
        grid = grid_of(simulation, 1, 2)
        if not is_here:
            grid.peers = [dataclasses.replace(peer, table="") for peer in grid.peers]
        with pretending(grid):
            parts.add(values(1))
        link: Any = grid.part_link
        waits = [link.look() for _ in range(8)]
    assert any(group.aborted for group in groups) == is_here
    if is_here:
        assert "part 1 (rank 1" in said[0]
    else:
        assert None not in waits and not said
