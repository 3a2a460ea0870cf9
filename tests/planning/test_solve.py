"""The solver against exhaustive search, against rotor's dynamic program, and against known optima."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
from chains import MB, block, network

from hvd_ckpt.planning.chain import MAX_NESTING, Block, Item, Run, bottleneck, simulate
from hvd_ckpt.planning.solver import Solver

WITHIN = 1.01


def random_chain(rng: random.Random, blocks: int, choices: int, joined: float) -> list[Block]:
    """Small integers, with no order between the costs; times in quarters, so that their sums are exact."""

    def one() -> Block:
        ways = [
            (rng.randint(0, 20) / 4, rng.randint(0, 20), rng.randint(0, 24), rng.randint(0, 30))
            for _ in range(choices)
        ]
        made = block(
            *ways,
            output=rng.randint(0, 10),
            forward=rng.randint(0, 8) / 4,
            working=rng.randint(0, 20),
            joins=rng.random() < joined,
        )
        return dataclasses.replace(made, frame=rng.choice((0, 6)))

    return [one() for _ in range(blocks)]


def in_joined_run(chain: list[Block], index: int) -> bool:
    return (index + 1 < len(chain) and chain[index].joins_next) or (index > 0 and chain[index - 1].joins_next)


def schedules(chain: list[Block], first: int, last: int, inside: bool = False) -> Iterator[tuple[Item, ...]]:
    """Every schedule of blocks first to last, without a segment that covers all of the one around it."""
    if first > last:
        yield ()
        return
    for choice in range(len(chain[first].choices)):
        for rest in schedules(chain, first + 1, last):
            yield (Run(first, choice), *rest)
    if not in_joined_run(chain, first):
        return
    for end in range(first, last + (not inside)):
        for items in schedules(chain, first, end, inside=True):
            for rest in schedules(chain, end + 1, last):
                yield (items, *rest)
        if not chain[end].joins_next:
            break


def best_points(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those that no other beats in both peak and seconds."""
    best: list[tuple[int, float]] = []
    for peak, seconds in sorted(set(points)):
        if not best or seconds < best[-1][1]:
            best.append((peak, seconds))
    return best


# ---- the model itself ----


def test_simulate_by_hand():
    chain = [
        block((3.0, 5, 6, 9), output=2, forward=1.0, working=4),
        block((4.0, 7, 7, 12), output=3, forward=1.5, working=5),
        block((2.0, 4, 8, 10), output=1, forward=0.5, working=2),
    ]
    # Backward of block 2 starts above 5 + 7 bytes.
    assert simulate(chain, [Run(0, 0), Run(1, 0), Run(2, 0)]) == (5 + 7 + 10, 9.0)
    # Backward of block 2 above the output of block 1: 3 + 10. The recomputation: 5 + 12, forward with 3 waiting.
    assert simulate(chain, [(Run(0, 0), Run(1, 0)), Run(2, 0)]) == (5 + 12, 9.0 + 2.5)
    # Recomputed one by one: first passes 1 + 1.5 and then 1 again; 2 + 12 while block 1 is run backward.
    nested = ((Run(0, 0),), Run(1, 0))
    assert simulate(chain, [nested, Run(2, 0)]) == (2 + 12, 9.0 + 2.5 + 1.0)
    assert bottleneck(chain, [nested, Run(2, 0)]) == 1
    # The first pass of the inner segment runs again while the gradient of the outer one waits.
    busy = [dataclasses.replace(chain[0], forward_working=40), *chain[1:]]
    assert simulate(busy, [nested, Run(2, 0)])[0] == 40 + 3
    # What is held counts where the peaks of a choice say less.
    assert simulate([block((1.0, 9, 4, 4), joins=False)], [Run(0, 0)])[0] == 9
    # A segment holds its frame from its first pass to the end of its backward pass.
    framed = [dataclasses.replace(one, frame=2) for one in chain]
    assert simulate(framed, [nested, Run(2, 0)])[0] == 2 + 12 + 4
    assert simulate(framed, [(Run(0, 0), Run(1, 0)), Run(2, 0)])[0] == 5 + 12 + 2
    # Casts are held until the forward pass ends, and not while the last block runs backward; also those of a first pass.
    mixed = [dataclasses.replace(one.with_costs(lambda _: {"casts": 6}), casts=6) for one in chain]
    assert simulate(mixed, [Run(0, 0), Run(1, 0), Run(2, 0)])[0] == 5 + 7 + 12 + 8
    assert simulate(mixed, [(Run(0, 0), Run(1, 0)), Run(2, 0)])[0] == 3 + 12 + 8


# ---- the best of all schedules ----


@pytest.mark.parametrize(
    ("blocks", "choices", "joined", "chains"),
    [
        (1, 3, 1.0, 20),
        (2, 6, 0.7, 60),
        (3, 2, 0.8, 100),
        (4, 2, 0.9, 20),
        (5, 1, 1.0, 30),
        (5, 4, 0.0, 30),
        (6, 1, 0.9, 8),
    ],
)
def test_best_of_all_schedules(blocks, choices, joined, chains):
    """The smallest peak is that of the best schedules, and times at random budgets are within 1 % of theirs."""
    rng = random.Random(blocks)
    for _ in range(chains):
        chain = random_chain(rng, blocks, choices, joined)
        best = best_points([simulate(chain, items) for items in schedules(chain, 0, blocks - 1)])
        solver, smallest = Solver(chain), best[0][0]
        assert solver.smallest.peak == smallest
        assert solver.fastest.seconds <= WITHIN * best[-1][1]
        assert solver.solve(smallest - 1) is None
        for budget in [smallest, *(rng.randint(smallest, best[-1][0] + 5) for _ in range(3))]:
            solution = solver.solve(budget)
            assert simulate(chain, solution.items) == (solution.peak, solution.seconds)
            assert solution.peak <= budget
            assert solution.seconds <= WITHIN * max(point for point in best if point[0] <= budget)[1]


@pytest.mark.parametrize("seed", range(12))
def test_long_chains_stay_within_any_budget(seed):
    rng = random.Random(seed)
    frame, casts = rng.choice((0, MB // 4)), rng.choice((0, 8 * MB))
    chain = [
        # The less is kept, the more of a weight's cast is held beside it.
        dataclasses.replace(
            one.with_costs(lambda way, all=one.choices[0].kept: {"casts": casts * (way.kept < all)}),
            casts=casts,
            frame=frame,
        )
        for one in network(rng, 20, rng.randint(1, 4), joins=seed % 2 == 0)
    ]
    solver = Solver(chain)
    assert solver.solve(solver.smallest.peak - 1) is None
    points = solver.frontier(points=16)
    assert len(points) <= 16 and points[0].peak == solver.smallest.peak
    fastest = sum(min(choice.seconds for choice in one.choices) for one in chain)
    assert points[-1].seconds == pytest.approx(fastest)
    for smaller, larger in itertools.pairwise(points):
        assert smaller.peak < larger.peak and smaller.seconds > larger.seconds
    for point in points:
        solution = solver.solve(point.peak)
        assert simulate(chain, point.items) == (point.peak, point.seconds)
        assert simulate(chain, solution.items) == (solution.peak, solution.seconds)
        assert solution.peak <= point.peak and point.seconds <= WITHIN * solution.seconds


def test_segments_are_nested_no_deeper_than_python_can_run_them():
    """A hundred levels could do with 7 bytes."""
    smallest = Solver([block((3.0, 4, 4, 6), output=1, working=1)] * 100).smallest

    def depth(item):
        return 1 + max(map(depth, item)) if isinstance(item, tuple) else 0

    assert smallest.peak == 8 and max(map(depth, smallest.items)) <= MAX_NESTING
