"""Schedules: they end, hold few micro-batches, and keep the order of the backward passes; cuts are the best there are."""

from __future__ import annotations

import itertools
import random

import pytest

from hvd_ckpt.planning.balance import balance_costs
from hvd_ckpt.planning.schedule import (
    BACKWARD,
    FORWARD,
    Edge,
    bubble,
    chain_edges,
    followed_at_once,
    in_flight,
    make_schedule,
    simulate,
    timeline,
)


def random_edges(chunks: int, generator: random.Random) -> list[Edge]:
    skips = [Edge(*sorted(generator.sample(range(chunks), 2))) for _ in range(generator.randrange(4))]
    return chain_edges(chunks, skips if chunks > 1 else ())


def test_schedules_end_whatever_the_sizes_and_skips() -> None:
    generator = random.Random(1)
    for _ in range(1000):
        name = generator.choice(("gpipe", "1f1b", "interleaved"))
        stages, micro_batches = generator.randint(1, 6), generator.randint(1, 12)
        virtual = 1 if name == "1f1b" else generator.randint(1, 4)
        chunks = stages * virtual
        edges = random_edges(chunks, generator) if chunks > 1 else chain_edges(1)
        schedule = make_schedule(name, stages, micro_batches, virtual, edges)
        simulate(schedule)  # raises if the ranks wait for each other
        for stage, actions in enumerate(schedule):
            assert all(action.chunk % stages == stage for action in actions)
            for chunk, kind in itertools.product(range(stage, chunks, stages), (FORWARD, BACKWARD)):
                order = [one.micro_batch for one in actions if (one.chunk, one.kind) == (chunk, kind)]
                assert order == list(range(micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 8), (3, 2), (4, 8), (5, 7)])
def test_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    held = simulate(make_schedule("1f1b", stages, micro_batches))
    assert held == [min(stages - stage, micro_batches) for stage in range(stages)]
    assert simulate(make_schedule("gpipe", stages, micro_batches)) == [micro_batches] * stages
    for name in ("1f1b", "gpipe"):
        schedule = make_schedule(name, stages, micro_batches)
        assert in_flight(schedule) == simulate(schedule)
    held = simulate(make_schedule("interleaved", stages, stages * micro_batches, 2))
    assert all(count <= 2 * (stages - stage - 1) + stages + 1 for stage, count in enumerate(held))


def test_backward_passes_that_follow_at_once() -> None:
    stages = make_schedule("1f1b", 3, 4)
    assert followed_at_once(stages[2]) == {(2, number) for number in range(4)}
    assert not followed_at_once(stages[0]) and not followed_at_once(stages[1])
    for name in ("gpipe", "1f1b"):
        assert followed_at_once(make_schedule(name, 1, 1)[0]) == {(0, 0)}
    assert not followed_at_once(make_schedule("gpipe", 1, 2)[0])


def test_one_forward_one_backward_in_turn() -> None:
    first, last = make_schedule("1f1b", 2, 4)
    assert [action.kind[0] + str(action.micro_batch) for action in first] == [
        "f0",
        "f1",
        "b0",
        "f2",
        "b1",
        "f3",
        "b2",
        "b3",
    ]
    assert [action.kind[0] + str(action.micro_batch) for action in last] == [
        "f0",
        "b0",
        "f1",
        "b1",
        "f2",
        "b2",
        "f3",
        "b3",
    ]


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_waits_at_the_ends_of_a_step_are_divided_by_the_chunks(stages: int, virtual: int) -> None:
    """In units of a chunk's forward pass, of which a backward pass takes two."""
    schedule = make_schedule("interleaved", stages, 2 * stages, virtual)
    chunks = stages * virtual
    spans = timeline(schedule, [1.0] * chunks, [2.0] * chunks)
    assert max(rank[-1].end for rank in spans) == 3 * (2 * chunks + stages - 1)
    assert bubble(spans) == pytest.approx((stages - 1) / (2 * chunks + stages - 1))
    assert all(len(rank) == len(actions) for rank, actions in zip(spans, schedule))


def test_what_would_wait_for_ever_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    first = schedule[0]
    backward = next(place for place, action in enumerate(first) if action.kind == BACKWARD)
    waits = [[first[backward], *first[:backward], *first[backward + 1 :]], schedule[1]]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(waits)
    reverse = make_schedule("gpipe", 1, 2)
    with pytest.raises(ValueError, match="out of order"):
        simulate([[*reverse[0][:2], *reversed(reverse[0][2:])]])
    with pytest.raises(ValueError, match="twice"):
        simulate([[*reverse[0], reverse[0][0]]])
    with pytest.raises(ValueError, match="lacks"):
        simulate([reverse[0][:-1]])


def test_cuts_are_the_best_of_all() -> None:
    generator = random.Random(2)
    for _ in range(300):
        count = generator.randint(1, 9)
        parts = generator.randint(1, count)
        costs = [generator.choice((0.0, 1.0, generator.random() * 9)) for _ in range(count)]
        balance = balance_costs(costs, parts)
        assert len(balance) == parts and sum(balance) == count and min(balance) > 0
        ends = list(itertools.accumulate(balance))
        longest = max(sum(costs[end - length : end]) for length, end in zip(balance, ends))
        every = (
            max(sum(costs[start:end]) for start, end in itertools.pairwise((0, *cuts, count)))
            for cuts in itertools.combinations(range(1, count), parts - 1)
        )
        assert longest == pytest.approx(min(every))


def block_partition(costs: list[float], parts: int) -> float:
    """The largest part of a block partition (Barany, Grolmusz, "Block partitions of sequences", 2015), as torchgpipe balances."""
    largest = max(costs)
    count = len(costs)
    ends = [count * (part + 1) // parts for part in range(parts)]
    for _ in range(10000):
        sizes = [sum(costs[start:end]) for start, end in itertools.pairwise((0, *ends))]
        most, least = max(sizes), min(sizes)
        if most <= least + largest:
            break
        full = sizes.index(most)
        empty = min(
            (part for part in range(parts) if sizes[part] == least), key=lambda part: abs(part - full)
        )
        if full < empty:  # the smallest part takes a block from its neighbour towards the largest
            ends[empty - 1] -= 1
        else:
            ends[empty] += 1
    return max(sizes)


def test_cuts_are_never_worse_than_block_partitions() -> None:
    generator = random.Random(3)
    better = 0
    for _ in range(1000):
        count = generator.randint(2, 40)
        parts = generator.randint(2, min(count, 8))
        kind = generator.randrange(3)
        costs = [
            (generator.random() ** (1, 4, 1)[kind]) + (0, 0, number / count)[kind] for number in range(count)
        ]
        ends = list(itertools.accumulate(balance_costs(costs, parts)))
        longest = max(sum(costs[start:end]) for start, end in itertools.pairwise((0, *ends)))
        theirs = block_partition(costs, parts)
        assert longest <= theirs * (1 + 1e-9)
        better += longest < 0.99 * theirs
    assert better > 100
