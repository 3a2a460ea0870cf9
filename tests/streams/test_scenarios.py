"""Streams of small parts: gradients in buckets, local SGD, messages of stages, snapshots, spans and compressed tensors."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alike_ranks import AlikeRanks
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum
from loopback import Loopback
from streams import DEVICE, Scenario, Simulation, check, own_stream, simulated
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives.exchange import Traffic
from hvd_ckpt.collectives.formats import WIRE_FORMATS
from hvd_ckpt.collectives.rows import RowCollectives
from hvd_ckpt.parallel.local_sgd.exchange import PeerExchange
from hvd_ckpt.parallel.local_sgd.runs import Segment
from hvd_ckpt.parallel.local_sgd.weights import WeightRun
from hvd_ckpt.parallel.pipeline.transport import Transport
from hvd_ckpt.recompute.saved import compress
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.communicator import Communicator
from hvd_ckpt.reduction.reducer import Reducer
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.utils.spans import SpanTimes, recording, span

_number = itertools.count(1)


def train(
    simulation: Simulation, op: int = Average, compression: Any = Compression.none, dtype: Any = None
) -> None:
    """Steps on a stream of its own. A parameter is used for the first time in the third, and one is used twice in the fourth."""
    with AlikeRanks(simulation).running() as ranks:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(DEVICE, dtype)
        named = list(model.named_parameters())
        communicator = Communicator(ranks.process_set, op, 1.0, 1.0, compression)
        assignment = BucketAssignment(named, 1 << 13, None)
        reducer = Reducer(assignment, communicator, next(_number), False, True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        reducer.begin(optimizer)
        batch = torch.ones(8, 32, dtype=dtype, device=DEVICE)
        with own_stream():
            for step in range(6):
                output = model[:3](batch) if step < 2 else model(batch)
                if step == 3:
                    output = model[0](output)
                output.square().mean().backward()
                reducer.synchronize()
                optimizer.step()
                optimizer.zero_grad()


def average(simulation: Simulation, wire: str) -> None:
    """Periods of steps, each with an average that the host reads, as a snapshot does."""
    with AlikeRanks(simulation).running() as ranks:
        parameter = nn.Parameter(torch.ones(500, device=DEVICE))
        segment = Segment("weight", parameter, parameter)
        peers = PeerExchange(RowCollectives(ranks.process_set, "local"), [0, 1], Traffic())
        outer: Any = hc.Nesterov(lr=0.7)
        averaged = WeightRun("weights", [segment], peers, outer, WIRE_FORMATS[wire])
        with own_stream(), torch.no_grad():
            averaged.begin()
            for _ in range(3):
                parameter.add_(1)
                averaged.send()
                parameter.mul_(1.5)
                averaged.combine([0.5, 0.5])
                averaged.apply(delayed=True)
                state = averaged.state_dict()
                for name in ("anchor", "exact", "rest"):
                    if state[name] is not None:
                        float(state[name].sum())


def messages(simulation: Simulation) -> None:
    """The fourth is expected before it comes, and the last has another shape."""
    grid: Any = SimpleNamespace(link=Loopback(simulation), name=str, stage_link=None, number=1)
    transport = Transport(grid)
    for number in range(5):
        value = torch.ones(64 if number < 4 else 32, device=DEVICE).mul_(number)
        if number > 2:
            transport.expect(0, 1)
        transport.send(value, 0, 1)
        (received,) = transport.receive(0, 1, "the input").tensors
        assert torch.equal(received.add_(1), value + 1)
        transport.flush()


def snapshots(simulation: Simulation) -> None:
    """Two snapshots, the second into the memory of the first, each between two steps of training."""
    weights, statistics = torch.ones(1000, device=DEVICE), torch.zeros(10, device=DEVICE)
    staging = Staging()
    for _ in range(2):
        weights.add_(1)  # the optimizer's step
        staging.restart()
        copies = staging.copy_of(statistics, at_once=True), staging.copy_of(weights)
        staging.start()
        statistics.add_(weights[:10])  # the next forward pass
        with simulation.thread("writer"):
            staging.run()
            total = sum(float(copy.sum()) for copy in copies)
        assert total == float(weights.sum()) + float(statistics.sum()) - float(weights[:10].sum())
        simulation.wait_for_thread("writer")


def spans(simulation: Simulation) -> None:
    times = SpanTimes(DEVICE)
    with recording(times):
        for _ in range(3):
            with span("forward"):
                pass
    assert times.read()["forward"] > 0


BUCKETS: list[dict[str, Any]] = [
    {},
    {"op": Sum},
    {"compression": Compression.fp16},
    {"dtype": torch.bfloat16},
]
SCENARIOS: dict[str, tuple[int, list[Scenario]]] = {  # the number of synchronizations
    "gradients in buckets": (0, [functools.partial(train, **options) for options in BUCKETS]),
    "local SGD": (1, [functools.partial(average, wire=wire) for wire in ("fp32", "int8")]),
    "messages of stages": (1, [messages]),
    "snapshots": (2, [snapshots]),
    "spans": (1, [spans]),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_synchronization_is_needed(name: str) -> None:
    number, scenarios = SCENARIOS[name]
    assert len(check(*scenarios)) == number


def test_the_host_waits_in_the_writers_thread_alone() -> None:
    with simulated() as simulation:
        weights, staging = torch.ones(1000, device=DEVICE), Staging()
        staging.copy_of(weights)
        staging.start()
        assert not simulation.waits
        staging.run()
        assert len(simulation.waits) == 1


MASK = torch.arange(5000) % 3 == 0


@pytest.mark.parametrize(
    "tensor, waits",
    [
        (MASK, 0),
        (MASK.float() * 1.25, 2),
        (torch.zeros(3000, dtype=torch.int64), 2),
        (torch.linspace(0, 1, 5000), 1),
    ],
)
def test_the_host_waits_a_few_times_and_not_to_restore(tensor: torch.Tensor, waits: int) -> None:
    compressed_here = compress(tensor)
    with simulated() as simulation:
        given = tensor.to(DEVICE)
        simulation.waits.clear()
        compressed = compress(given)
        assert len(simulation.waits) == waits
        assert (compressed is None) == (compressed_here is None)
        if compressed is not None and compressed_here is not None:
            simulation.waits.clear()
            restored = compressed.get()
            assert restored.device == DEVICE and not simulation.waits
            assert torch.equal(compressed.payload.cpu(), compressed_here.payload)
            assert torch.equal(restored.cpu(), compressed_here.get())
        assert not simulation.races
