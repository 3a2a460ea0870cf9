"""Tests of schedules (they end, hold few micro-batches, keep the order of backward passes) and of optimal cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from hvd_ckpt.parallel.pipeline.balance import balance_costs
from hvd_ckpt.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    Edge,
    bubble,
    chain_edges,
    followed_at_once,
    in_flight,
    make_schedule,
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
        assert sum(map(len, schedule)) == 2 * chunks * micro_batches
        for stage, actions in enumerate(schedule):
            assert all(action.chunk % stages == stage for action in actions)
            for chunk, kind in itertools.product(range(stage, chunks, stages), (FORWARD, BACKWARD)):
                order = [one.micro_batch for one in actions if (one.chunk, one.kind) == (chunk, kind)]
                assert order == list(range(micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 8), (3, 2), (4, 8), (5, 7)])
def test_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    held = in_flight(make_schedule("1f1b", stages, micro_batches))
    assert held == [min(stages - stage, micro_batches) for stage in range(stages)]
    assert in_flight(make_schedule("gpipe", stages, micro_batches)) == [micro_batches] * stages
    for stage, actions in enumerate(make_schedule("interleaved", stages, stages * micro_batches, 2)):
        held = itertools.accumulate(1 if action.kind == FORWARD else -1 for action in actions)
        assert max(held) <= 2 * (stages - stage - 1) + stages + 1


def test_backward_passes_that_follow_at_once() -> None:
    stages = make_schedule("1f1b", 3, 4)
    assert followed_at_once(stages[2]) == {(2, number) for number in range(4)}
    assert not followed_at_once(stages[0]) and not followed_at_once(stages[1])
    for name in ("gpipe", "1f1b"):
        assert followed_at_once(make_schedule(name, 1, 1)[0]) == {(0, 0)}
    assert not followed_at_once(make_schedule("gpipe", 1, 2)[0])


def test_one_forward_one_backward_in_turn() -> None:
    first, last = make_schedule("1f1b", 2, 4)
    shown = [
        " ".join(f"{action.kind[0]}{action.micro_batch}" for action in actions) for actions in (first, last)
    ]
    assert shown == ["f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]


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
        timeline(waits, [1.0] * 2, [1.0] * 2)
    with pytest.raises(ValueError, match="wait for each other"):
        timeline([make_schedule("gpipe", 1, 1)[0][::-1]], [1.0], [1.0])  # backward before forward


@pytest.mark.parametrize(("blocks", "most", "chains"), [(9, 9, 300), (40, 3, 50), (20, 5, 20)])
def test_cuts_are_the_best_of_all(blocks: int, most: int, chains: int) -> None:
    generator = random.Random(2)
    for _ in range(chains):
        count = generator.randint(1, blocks)
        parts = generator.randint(1, min(count, most))
        costs = [generator.choice((0.0, 1.0, generator.random() ** 4 * 9)) for _ in range(count)]
        balance = balance_costs(costs, parts)
        assert len(balance) == parts and sum(balance) == count and min(balance) > 0
        ends = list(itertools.accumulate(balance))
        longest = max(sum(costs[end - length : end]) for length, end in zip(balance, ends))
        every = (
            max(sum(costs[start:end]) for start, end in itertools.pairwise((0, *cuts, count)))
            for cuts in itertools.combinations(range(1, count), parts - 1)
        )
        assert longest == pytest.approx(min(every))
