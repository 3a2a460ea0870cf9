"""Schedules of a pipeline: the order in which each rank runs the forward and backward passes of micro-batches.

A schedule is data: a list of actions for each rank, made before training, for which :func:`timeline` shows that it ends. The model
is cut into ``stages * virtual_stages`` chunks of consecutive blocks, and chunk c runs on stage ``c % stages``.

All schedules run the backward passes of a chunk in the order of its micro-batches, so gradients add up as they do in
:func:`hvd_ckpt.accumulate`, bit for bit.

- ``"gpipe"``: all forward passes, then all backward passes (Huang et al., "GPipe", 2019, there in reverse order).
- ``"1f1b"``: stage s of p runs p - s - 1 forward passes, and then one forward and one backward pass in turn. It holds the
  activations of at most p - s micro-batches (Narayanan et al., "PipeDream", 2019).
- ``"interleaved"``: 1f1b with several chunks on each rank. The time that ranks wait at both ends of a step is divided by the number
  of chunks (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Three stages and four micro-batches, if all passes take the same time. F2: forward pass of micro-batch 2, B2: its backward pass,
# "." : the stage waits.
#
#     gpipe      stage 0    F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
#                stage 1     . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
#                stage 2     .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
#
#     1f1b       stage 0    F0 F1 F2  .  . B0 F3 B1  . B2  . B3      stage 0 holds 3 micro-batches instead of 4,
#                stage 1     . F0 F1  . B0 F2 B1 F3 B2  . B3  .      stage 1 holds 2,
#                stage 2     .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .      stage 2 holds 1; the time is the same
#
# Interleaved, two stages with two chunks each: a and c on stage 0, b and d on stage 1. c1: forward pass of micro-batch 1 through
# chunk c, C1: its backward pass. Micro-batches go through a chunk in groups of as many as there are stages: a0 a1, c0 c1, a2 a3,
# ...
#
#                stage 0    a0 a1 c0 c1 a2 C0 a3 C1 c2 A0 c3 A1  . C2  . C3 A2 A3
#                stage 1     . b0 b1 d0 D0 d1 D1 b2 B0 b3 B1 d2 D2 d3 D3 B2 B3  .

FORWARD, BACKWARD = "forward", "backward"
NAMES = ("gpipe", "1f1b", "interleaved")


class Edge(NamedTuple):
    """Connection from a chunk to a later one: to the next chunk, for its output, or to the target of a skip connection."""

    source: int
    target: int


@dataclass(frozen=True)
class Action:
    """The forward or backward pass of one micro-batch through one chunk.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        chunk, micro_batch: their numbers, from 0.
        receives: edges whose values (forward) or gradients (backward) the pass needs.
        sends: edges whose values or gradients the pass computes.
    """

    kind: str
    chunk: int
    micro_batch: int
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]


Schedule = list[list[Action]]


def virtual_stages_of(schedule: str, given: int | None) -> int:
    """The number of chunks on each rank: as given, or the default of the schedule.

    Raises:
        ValueError: the number is not an int from 1.
    """
    virtual = given if given is not None else 2 if schedule == "interleaved" else 1
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
        raise ValueError(f"virtual_stages must be a number from 1, got {given!r}")
    return virtual


def chain_edges(chunks: int, skips: Iterable[Edge] = ()) -> list[Edge]:
    """The edges of a chain of chunks and of its skip connections, each once, in a fixed order."""
    return sorted({*(Edge(chunk, chunk + 1) for chunk in range(chunks - 1)), *skips})


def check_name(name: str, virtual_stages: int) -> None:
    """Checks the name of a schedule.

    Raises:
        ValueError: the name is unknown, or ``"1f1b"`` is given several chunks on a rank.
    """
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "1f1b" and virtual_stages > 1:
        raise ValueError(
            f'schedule "1f1b" has one chunk on each rank, got virtual_stages={virtual_stages}: use "interleaved"'
        )


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1, edges: Sequence[Edge] | None = None
) -> Schedule:
    """The actions of each stage.

    Args:
        name: one of :data:`NAMES`.
        stages, virtual_stages: number of ranks of the pipeline, and of chunks on each rank.
        micro_batches: number of micro-batches in a step, from 1.
        edges: as :func:`chain_edges` returns them; by default those of a chain without skip connections.

    Raises:
        ValueError: as :func:`check_name`.
    """
    check_name(name, virtual_stages)
    chunks = stages * virtual_stages
    edges = chain_edges(chunks) if edges is None else edges
    orders = [_orders(stage, stages, micro_batches, virtual_stages, edges) for stage in range(stages)]
    total = micro_batches * virtual_stages
    for more in range(total + 1):
        warm_up = [_warm_up(name, stage, stages, virtual_stages, total) + more for stage in range(stages)]
        schedule = [_in_turn(*order, first) for order, first in zip(orders, warm_up)]
        try:
            # The times do not matter: whether ranks wait forever depends on the order of actions alone.
            timeline(schedule, [1.0] * chunks, [1.0] * chunks)
            return schedule
        except ValueError:
            pass  # ranks wait for each other, as they may with an incomplete last group: start with one more forward pass
    raise AssertionError("all forward passes first is a schedule that ends")


def _orders(
    stage: int, stages: int, micro_batches: int, virtual_stages: int, edges: Sequence[Edge]
) -> tuple[list[Action], list[Action]]:
    """The forward passes and the backward passes of a stage, in order.

    Micro-batches are in groups of as many as there are stages. Each group goes through one chunk after the other.
    """
    chunks = [stage + stages * number for number in range(virtual_stages)]
    before = {chunk: tuple(edge for edge in edges if edge.target == chunk) for chunk in chunks}
    after = {chunk: tuple(edge for edge in edges if edge.source == chunk) for chunk in chunks}
    forwards, backwards = [], []
    for start in range(0, micro_batches, stages):
        group = range(start, min(start + stages, micro_batches))
        forwards += [
            Action(FORWARD, chunk, index, before[chunk], after[chunk]) for chunk in chunks for index in group
        ]
        backwards += [
            Action(BACKWARD, chunk, index, after[chunk], before[chunk])
            for chunk in reversed(chunks)
            for index in group
        ]
    return forwards, backwards


def _warm_up(name: str, stage: int, stages: int, virtual_stages: int, total: int) -> int:
    """The number of forward passes that a stage runs before forward and backward passes take turns."""
    # 1f1b: one for each later stage. Interleaved: the first group through all chunks but the last, and two for each later stage,
    # since a micro-batch passes each of them on the way forward and on the way back.
    if name == "gpipe":
        return total
    if virtual_stages == 1:
        return stages - stage - 1
    return 2 * (stages - stage - 1) + (virtual_stages - 1) * stages


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Some forward passes, then one forward and one backward pass in turn, then the backward passes that are left."""
    started, others = forwards[:warm_up], forwards[warm_up:]
    # Each of the other forward passes has a backward pass behind it; as many backward passes as there were warm-up passes remain.
    turns = itertools.chain.from_iterable(zip(others, backwards))
    return [*started, *turns, *backwards[len(others) :]]


def needs(action: Action) -> set[tuple[str, int, int]]:
    """The actions that must run before this one, as (kind, chunk, micro-batch)."""
    index = action.micro_batch
    if action.kind == FORWARD:
        return {(FORWARD, edge.source, index) for edge in action.receives}
    return {(BACKWARD, edge.target, index) for edge in action.receives} | {(FORWARD, action.chunk, index)}


def in_flight(schedule: Schedule) -> list[int]:
    """For each chunk, the most micro-batches between their forward and their backward pass at a time."""
    held, most = Counter[int](), Counter[int]()
    for action in itertools.chain.from_iterable(schedule):  # a chunk's actions are all on one rank
        held[action.chunk] += 1 if action.kind == FORWARD else -1
        most[action.chunk] = max(most[action.chunk], held[action.chunk])
    return [most[chunk] for chunk in range(len(most))]


def followed_at_once(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """Chunk and micro-batch of each forward pass of a rank whose next action is its backward pass.

    Recomputing such a pass saves no memory.
    """
    return {
        (first.chunk, first.micro_batch)
        for first, then in itertools.pairwise(actions)
        if (then.kind, then.chunk, then.micro_batch) == (BACKWARD, first.chunk, first.micro_batch)
    }


class Span(NamedTuple):
    """An action with its start and its end, in seconds since the beginning of the step."""

    action: Action
    start: float
    end: float


def timeline(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> list[list[Span]]:
    """For each rank the times of its actions, if messages take no time.

    Args:
        forward, backward: seconds of a forward and of a backward pass through each chunk, the latter with its recomputation.

    Raises:
        ValueError: the ranks wait for each other forever.
    """
    ended: dict[tuple[str, int, int], float] = {}
    ranks: list[list[Span]] = [[] for _ in schedule]
    while len(ended) < sum(map(len, schedule)):
        before = len(ended)
        for spans, actions in zip(ranks, schedule):
            while len(spans) < len(actions) and needs(action := actions[len(spans)]) <= ended.keys():
                free = spans[-1].end if spans else 0.0
                start = max([free, *(ended[need] for need in needs(action))])
                end = start + (forward if action.kind == FORWARD else backward)[action.chunk]
                spans.append(Span(action, start, end))
                ended[action.kind, action.chunk, action.micro_batch] = end
        if len(ended) == before:
            raise ValueError("the schedule does not end: its ranks wait for each other")
    return ranks


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The share of the time of a step that ranks wait, from 0 to 1."""
    last = max(rank[-1].end for rank in spans)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1 - busy / (last * len(spans)) if last else 0.0
