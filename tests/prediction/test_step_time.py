"""Predicted steps: costs of collectives by hand for few ranks, growth with their number, what hides behind computation."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from benchmarks.suites.scale import WAYS
from benchmarks.ways import OneLevel, Rings, Sending, efficiency, step_in
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import Kind, ModelSizes, StepTime
from hvd_ckpt.prediction.training_layout import TrainingLayout

MIB = 1 << 20
# Easy numbers: 1 MB/s across hosts, 10 MB/s on a host, nothing else.
BARE = Network(local=2, bandwidth=1e6, local_bandwidth=1e7, latency=0, local_latency=0, message=0, cycle=0)
GPT = {"vocabulary": 512, "length": 32, "width": 128, "heads": 4, "layers": 4}


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    with torch.device("meta"):
        model = gpt(**GPT, checkpoint_interval=1)
    seconds = [1e-4] * len(model)
    return ModelSizes(model, seconds, [3 * each for each in seconds], 4 * GPT["length"] * GPT["width"] * 4)


def split_of(way: str, ranks: int) -> TrainingLayout:
    stages, parts = 2 if way == "stages" else 1, 2 if way == "tensor" else 1
    return TrainingLayout(ranks, stages=stages, tensor=parts, micro_batches=4 if stages > 1 else 1, every=5)


def sent_by(kind: Kind, nbytes: int, ranks: int = 4) -> float:
    step = Sending(BARE, TrainingLayout(ranks))
    step.launch(kind, nbytes)
    return step.sent


def test_a_ring_passes_each_link_once() -> None:
    assert BARE.ring(4e6, 4) == pytest.approx(3.0) and BARE.ring(4e6, 4, rounds=2) == pytest.approx(6.0)
    assert sent_by("all_gather", 4_000_000) == 3e6 and sent_by("allreduce", 4_000_000) == 6e6
    assert BARE.ring(4e6, 2) == pytest.approx(0.2)  # on one host
    slow = dataclasses.replace(BARE, latency=0.5, message=0.25)
    assert slow.ring(4e6, 4) == pytest.approx(3 * (1.0 + 0.5 + 0.25))
    assert BARE.ring(4e6, 1) == sent_by("all_gather", 4_000_000, 1) == 0.0
    # Of groups of three on hosts of four, some are on two hosts.
    four = dataclasses.replace(BARE, local=4)
    assert four.ring(3e6, 3) == pytest.approx(2.0) and four.ring(2e6, 2) == pytest.approx(0.1)
    assert StepTime(four, TrainingLayout(3)).network.ring(3e6, 3) == pytest.approx(0.2)  # one host


def test_an_alltoall_loads_a_link_as_often_as_a_host_has_ranks() -> None:
    # Both ranks of a host send two rows of 1 MB to the other host.
    assert BARE.rows(4e6, 4, 3, 1) == pytest.approx(4.0)
    assert sent_by("alltoall", 4_000_000) == pytest.approx(3e6 + 3 * 4)  # with the sizes of the rows


def test_sums_within_hosts_pass_the_link_once() -> None:
    # 2 MB to the neighbour on the host, then 1 MB of each of both ranks to the other host.
    assert BARE.scatter(4e6, 4) == pytest.approx(0.2 + 2.0, rel=1e-3)
    assert sent_by("scatter", 4_000_000) == pytest.approx(3e6, rel=1e-3)
    one = OneLevel(**vars(BARE))
    assert one.scatter(4e6, 4) == BARE.alltoall(4e6, 4)
    assert BARE.scatter(1e5, 4) == BARE.alltoall(1e5, 4)  # too little
    assert BARE.scatter(4e6, 2) == BARE.alltoall(4e6, 2)  # one host
    assert BARE.scatter(5e6, 5) == BARE.alltoall(5e6, 5)  # hosts of two, two and one
    large = Network()
    ratio = large.scatter(200 * MIB, 1024) / large.ring(200 * MIB, 1024)
    assert ratio < 1.1 < large.alltoall(200 * MIB, 1024) / large.ring(200 * MIB, 1024)


def test_a_small_allreduce_doubles_distances_over_mpi_and_goes_round_over_gloo() -> None:
    network = dataclasses.replace(BARE, latency=1.0, local_latency=0.1)
    assert network.allreduce(8, 8) == pytest.approx(0.1 + 2 * 1.0, rel=1e-3)
    assert sent_by("allreduce", 8, 8) == 3 * 8
    assert dataclasses.replace(network, controller="gloo").allreduce(8, 8) == pytest.approx(14.0, rel=1e-3)


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_more_ranks_send_no_faster(sizes: ModelSizes, controller: str) -> None:
    network = Network(controller=controller)
    narrow = dataclasses.replace(network, bandwidth=network.bandwidth / 10)
    for way in WAYS:
        found = [step_in(way, sizes, split_of(way, ranks), network) for ranks in (16, 64, 1024, 16384)]
        for fewer, more in itertools.pairwise(found):
            assert fewer.communicating < more.communicating and fewer.sent < more.sent
            assert 0 < efficiency(more) <= efficiency(fewer) <= 1
        assert step_in(way, sizes, split_of(way, 64), narrow).seconds > found[1].seconds


def test_communication_hides_behind_computation_until_it_is_waited_for() -> None:
    step = Rings(BARE, TrainingLayout(4))
    first = step.launch("all_gather", 4_000_000)  # 3 s
    step.compute(2.0)
    second = step.launch("all_gather", 4_000_000)  # after the first: until 6 s
    step.wait(first)
    step.compute(1.0)
    step.wait(second)
    assert (first, second) == pytest.approx((3.0, 6.0))
    assert (step.seconds, step.computing, step.communicating) == pytest.approx((6.0, 3.0, 6.0))
    assert efficiency(step) == pytest.approx(0.5)


def test_a_collective_waits_for_the_next_cycle_and_shares_it_with_what_is_ready() -> None:
    network = dataclasses.replace(BARE, cycle=1.0, local_latency=0.1, local_bandwidth=1e12)

    def ends(network: Network) -> list[float]:
        step = StepTime(network, TrainingLayout(2))
        step.compute(0.5)
        return [step.launch("all_gather", 8), step.launch("all_gather", 8)]

    # The next cycle, the agreement of two ranks, and one gather after the other: one agreement for both.
    assert ends(network) == pytest.approx([1.0 + 0.1 + 0.1, 1.0 + 0.1 + 0.2])
    over_gloo = ends(dataclasses.replace(network, controller="gloo"))
    assert 0.6 < over_gloo[0] < 1.0  # once it is ready, after an agreement
