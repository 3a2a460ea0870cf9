"""The model behind ``hvd-ckpt bench scale``: costs by hand for few ranks, growth with their number, timelines."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hvd_ckpt.bench.scale.command import WAYS
from hvd_ckpt.bench.scale.network import Network
from hvd_ckpt.bench.scale.replay import Saved, replay, snapshot, start
from hvd_ckpt.bench.scale.sizes import BASELINES, Sizes, Split
from hvd_ckpt.bench.scale.trace import Trace

MIB = 1 << 20
# Easy numbers: 1 MB/s across hosts, 10 MB/s on a host, nothing else.
BARE = Network(local=2, bandwidth=1e6, local_bandwidth=1e7, latency=0, local_latency=0, message=0, cycle=0)
GPT = {"vocabulary": 512, "length": 32, "width": 128, "heads": 4, "layers": 4}


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return Sizes(GPT, 4, 1e12)


def test_a_ring_passes_each_link_once() -> None:
    gather, reduce = BARE.ring(4e6, 4), BARE.ring(4e6, 4, rounds=2)
    assert gather.seconds == pytest.approx(3.0) and gather.sent == 3e6 and gather.messages == 3
    assert reduce == pytest.approx((6.0, 6e6, 6))
    assert BARE.ring(4e6, 2).seconds == pytest.approx(0.2)  # on one host
    slow = dataclasses.replace(BARE, latency=0.5, message=0.25)
    assert slow.ring(4e6, 4).seconds == pytest.approx(3 * (1.0 + 0.5 + 0.25))
    assert BARE.ring(4e6, 1) == (0.0, 0.0, 0.0)


def test_an_alltoall_loads_a_link_as_often_as_a_host_has_ranks() -> None:
    # Both ranks of a host send two rows of 1 MB to the other host.
    assert BARE.rows(4e6, 4, 3, 1).seconds == pytest.approx(4.0)
    assert BARE.alltoall(4e6, 4).sent == pytest.approx(3e6 + 3 * 4)
    assert BARE.alltoall(4e6, 4).messages == 6  # with the sizes of the rows


def test_sums_within_hosts_pass_the_link_once() -> None:
    two = BARE.scatter(4e6, 4)
    # 2 MB to the neighbour on the host, then 1 MB of each of both ranks to the other host.
    assert two.seconds == pytest.approx(0.2 + 2.0, rel=1e-3)
    assert two.sent == pytest.approx(3e6, rel=1e-3)
    one = dataclasses.replace(BARE, one_level=True)
    assert one.scatter(4e6, 4) == BARE.alltoall(4e6, 4)
    assert BARE.scatter(1e5, 4) == BARE.alltoall(1e5, 4)  # too little
    assert BARE.scatter(4e6, 2) == BARE.alltoall(4e6, 2)  # one host
    large = Network()
    ratio = large.scatter(200 * MIB, 1024).seconds / large.ring(200 * MIB, 1024).seconds
    assert ratio < 1.1 < large.alltoall(200 * MIB, 1024).seconds / large.ring(200 * MIB, 1024).seconds


def test_a_small_allreduce_doubles_distances_over_mpi_and_goes_round_over_gloo() -> None:
    network = dataclasses.replace(BARE, latency=1.0, local_latency=0.1)
    assert network.allreduce(8, 8).seconds == pytest.approx(0.1 + 2 * 1.0, rel=1e-3)
    assert network.allreduce(8, 8).messages == 3
    gloo = dataclasses.replace(network, controller="gloo")
    assert gloo.allreduce(8, 8).seconds == pytest.approx(14.0, rel=1e-3)


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_broadcast_of_nothing_is_a_message(controller: str) -> None:
    cost = Network(local=2, controller=controller).broadcast(0, 4)
    assert (cost.sent, cost.messages) == (0, 1) and cost.seconds > 0


def test_groups_that_talk_at_the_same_time_share_the_link() -> None:
    assert BARE.every(2) == dataclasses.replace(BARE, local=1, bandwidth=0.5e6)
    assert BARE.every(1) == BARE


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_more_ranks_send_no_faster(sizes: Sizes, controller: str) -> None:
    network = Network(controller=controller)
    for mode in WAYS:
        found = [
            replay(sizes.trace(mode, Split(ranks, 2, 2, 4)), network, ranks)
            for ranks in (16, 64, 1024, 16384)
        ]
        for fewer, more in itertools.pairwise(found):
            assert fewer.communicating < more.communicating and fewer.messages < more.messages
            assert 0 < more.efficiency <= fewer.efficiency <= 1
        narrow = dataclasses.replace(network, bandwidth=network.bandwidth / 10)
        trace = sizes.trace(mode, Split(64, 2, 2, 4))
        assert replay(trace, narrow, 64).seconds > replay(trace, network, 64).seconds


def test_communication_hides_behind_computation_until_it_is_waited_for() -> None:
    trace = Trace("one", queue=False)
    first = trace.launch("all_gather", 4_000_000)  # 3 s
    trace.compute(2.0)
    second = trace.launch("all_gather", 4_000_000)  # after the first: until 6 s
    trace.wait(first)
    trace.compute(1.0)
    trace.wait(second)
    timeline = replay(trace, BARE, 4)
    assert [*timeline.spans[0], *timeline.spans[1]] == pytest.approx([0.0, 3.0, 3.0, 6.0])
    assert (timeline.seconds, timeline.computing, timeline.communicating) == pytest.approx((6.0, 3.0, 6.0))
    assert timeline.efficiency == pytest.approx(0.5) and timeline.buffers == 8_000_000


def test_a_collective_waits_for_the_next_cycle_and_shares_it_with_what_is_ready() -> None:
    network = dataclasses.replace(BARE, cycle=1.0, local_latency=0.1, local_bandwidth=1e12)
    trace = Trace("queued")
    trace.compute(0.5)
    trace.launch("all_gather", 8)
    trace.launch("all_gather", 8)
    timeline = replay(trace, network, 2)
    first, second = timeline.spans
    assert first[0] == pytest.approx(1.0 + 0.1)  # the next cycle, and the agreement of two ranks
    assert first[1] == second[0] and second[1] - first[0] == pytest.approx(0.2)  # one agreement for both
    over_gloo = replay(trace, dataclasses.replace(network, controller="gloo"), 2)
    assert 0.5 < over_gloo.spans[0][0] < 1.0  # once it is ready, after an agreement


def test_an_operation_begins_after_the_one_that_it_needs() -> None:
    trace = Trace("sums", queue=False)
    first = trace.launch("alltoall", 4_000_000)
    trace.launch("all_gather", 4_000_000, after=first)
    timeline = replay(trace, BARE, 4)
    assert timeline.spans[1][0] == timeline.spans[0][1]


def test_shards_send_what_they_say(sizes: Sizes) -> None:
    """Whole gradients twice; with parameters in shards, two gathers and one scatter. In the mean over the steps of local SGD."""
    sent = {
        mode: replay(sizes.trace(mode, Split(4, 2, 2, 4, 5)), Network(local=4), 4).sent
        / (0.75 * sizes.nbytes)
        for mode in WAYS
    }
    expected = {"none": 2, "optimizer": 3, "gradients": 2, "parameters": 3, "replicas": 2, "local": 2 / 5}
    expected |= {"ddp": 2, "fsdp2": 3, "ring": 2}
    # Embeddings, 8 % of the weights, are whole from the forward to the backward pass, and gathered once.
    assert {mode: sent[mode] for mode in expected} == pytest.approx(expected, rel=0.03)


def test_baselines_wait_for_no_cycle(sizes: Sizes) -> None:
    assert not any(sizes.trace(mode, Split(8)).queue for mode in BASELINES)


def test_a_start_over_gloo_asks_the_launcher_as_often_as_there_are_pairs(sizes: Sizes) -> None:
    begun = {
        (controller, ranks): start(sizes.start("none"), Network(controller=controller), ranks).processes
        for controller in ("mpi", "gloo")
        for ranks in (8, 1024)
    }
    assert begun["mpi", 8] == begun["mpi", 1024]
    assert begun["gloo", 1024] > 60 > begun["gloo", 8]


def test_shards_divide_what_a_rank_writes_and_what_hosts_read() -> None:
    whole, parts = (
        snapshot(Saved(10**9, 2 * 10**9, sharded, sharded), Network(local=8), 64, 1e10)
        for sharded in (False, True)
    )
    assert parts.write < whole.write and parts.load < whole.load
    assert whole.read == (1 + 8) * 3e9 and parts.read == (1 + 1) * 3e9
