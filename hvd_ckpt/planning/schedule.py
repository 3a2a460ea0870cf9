"""Schedules: the order in which each rank runs the forward and backward passes of micro-batches.

A schedule is data: one list of actions for each rank, made before training and checked by :func:`check_schedule`. The model is
cut into ``stages * virtual_stages`` chunks of consecutive blocks, and chunk c runs on stage ``c % stages``.

All schedules run the backward passes of a chunk in the order of its micro-batches, so that gradients add up as they do in
:func:`hvd_ckpt.accumulate`, bit for bit.

- ``"gpipe"``: all forward passes, then all backward passes (Huang et al., "GPipe", 2019, there in reverse order).
- ``"1f1b"``: stage s of p runs p - s - 1 forward passes, then one forward and one backward pass in turn, so that it holds the
  activations of at most p - s micro-batches (Narayanan et al., "PipeDream", 2019).
- ``"interleaved"``: the same with several chunks on each rank, which divides the time that ranks wait at the ends of a step by
  their number (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
NAMES = ("gpipe", "1f1b", "interleaved")


class Edge(NamedTuple):
    """Values that one chunk hands to a later one: its output to the next chunk, or skip connections."""

    source: int
    target: int


@dataclass(frozen=True)
class Action:
    """The forward or backward pass of one micro-batch through one chunk.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        chunk, micro_batch: which, from 0.
        receives: edges whose values (forward) or gradients (backward) it needs.
        sends: edges whose values or gradients it makes.
    """

    kind: str
    chunk: int
    micro_batch: int
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]


Schedule = list[list[Action]]


def virtual_stages_of(schedule: str, given: int | None) -> int:
    """Chunks of the model on each rank: as given, or the schedule's default.

    Raises:
        ValueError: it is not a number from 1.
    """
    virtual = given if given is not None else 2 if schedule == "interleaved" else 1
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
        raise ValueError(f"virtual_stages must be a number from 1, got {given!r}")
    return virtual


def chain_edges(chunks: int, skips: Iterable[Edge] = ()) -> list[Edge]:
    """The edges of a chain of chunks with skip connections between them, each once, in a fixed order."""
    return sorted({*(Edge(chunk, chunk + 1) for chunk in range(chunks - 1)), *skips})


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1, edges: Sequence[Edge] | None = None
) -> Schedule:
    """The actions of each stage.

    Args:
        name: one of :data:`NAMES`.
        stages, virtual_stages: ranks of the pipeline, and chunks on each of them.
        micro_batches: in a step; any number from 1.
        edges: of :func:`chain_edges`; by default those of a chain without skip connections.

    Raises:
        ValueError: the name is unknown, or ``"1f1b"`` is to have several chunks on a rank.
    """
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "1f1b" and virtual_stages > 1:
        raise ValueError(
            f'schedule "1f1b" has one chunk on each rank, got virtual_stages={virtual_stages}: use "interleaved"'
        )
    chunks = stages * virtual_stages
    edges = chain_edges(chunks) if edges is None else edges
    orders = [_orders(stage, stages, micro_batches, virtual_stages, edges) for stage in range(stages)]
    total = micro_batches * virtual_stages
    for more in range(total + 1):
        warm_up = [_warm_up(name, stage, stages, virtual_stages, total) + more for stage in range(stages)]
        schedule = [_in_turn(*order, first) for order, first in zip(orders, warm_up)]
        try:
            check_schedule(schedule)
            return schedule
        except ValueError:
            pass  # where the last group of micro-batches is not full, ranks may need more of a start
    raise AssertionError("all forward passes first is a schedule that ends")


def _orders(
    stage: int, stages: int, micro_batches: int, virtual_stages: int, edges: Sequence[Edge]
) -> tuple[list[Action], list[Action]]:
    """A stage's forward passes and its backward passes, in order: in groups of as many micro-batches as there are stages, each
    group through one chunk after the other."""
    own = [stage + stages * number for number in range(virtual_stages)]
    forwards, backwards = [], []
    for start in range(0, micro_batches, stages):
        group = range(start, min(start + stages, micro_batches))
        forwards += [_action(FORWARD, chunk, index, edges) for chunk in own for index in group]
        backwards += [_action(BACKWARD, chunk, index, edges) for chunk in reversed(own) for index in group]
    return forwards, backwards


def _action(kind: str, chunk: int, micro_batch: int, edges: Sequence[Edge]) -> Action:
    before = tuple(edge for edge in edges if edge.target == chunk)
    after = tuple(edge for edge in edges if edge.source == chunk)
    receives, sends = (before, after) if kind == FORWARD else (after, before)
    return Action(kind, chunk, micro_batch, receives, sends)


def _warm_up(name: str, stage: int, stages: int, virtual_stages: int, total: int) -> int:
    """How many forward passes a stage runs before forward and backward passes take turns."""
    if name == "gpipe":
        return total
    if virtual_stages == 1:
        return stages - stage - 1
    return 2 * (stages - stage - 1) + (virtual_stages - 1) * stages


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    started, others = forwards[:warm_up], forwards[warm_up:]
    turns = itertools.chain.from_iterable(zip(others, backwards))
    return [*started, *turns, *backwards[len(others) :]]


def needs(action: Action) -> set[tuple[str, int, int]]:
    """The actions, as (kind, chunk, micro-batch), that must have run before this one."""
    index = action.micro_batch
    if action.kind == FORWARD:
        return {(FORWARD, edge.source, index) for edge in action.receives}
    return {(BACKWARD, edge.target, index) for edge in action.receives} | {(FORWARD, action.chunk, index)}


def check_schedule(schedule: Schedule) -> None:
    """Checks a schedule without computing anything.

    Raises:
        ValueError: the ranks wait for each other without an end; an action is missing or runs twice; a chunk's backward passes
            are not in the order of the micro-batches.
    """
    orders: dict[tuple[str, int], list[int]] = {}
    for action in itertools.chain.from_iterable(schedule):
        orders.setdefault((action.kind, action.chunk), []).append(action.micro_batch)
    chunks = 1 + max(chunk for _, chunk in orders)
    micro_batches = list(range(1 + max(map(max, orders.values()))))
    for kind, chunk in itertools.product((FORWARD, BACKWARD), range(chunks)):
        order = orders.get((kind, chunk), [])
        if len(order) > len(set(order)):
            raise ValueError(f"the schedule runs a {kind} pass through chunk {chunk} twice")
        if len(order) < len(micro_batches):
            raise ValueError(f"the schedule lacks a {kind} pass through chunk {chunk}")
        if kind == BACKWARD and order != micro_batches:
            raise ValueError(f"the schedule runs a {kind} pass through chunk {chunk} out of order")
    timeline(schedule, [1.0] * chunks, [1.0] * chunks)


def in_flight(schedule: Schedule) -> list[int]:
    """For each chunk of the model the most micro-batches whose forward pass has run and whose backward pass is still to come."""
    held, most = Counter[int](), Counter[int]()
    for action in itertools.chain.from_iterable(schedule):  # a chunk's actions are all on one rank
        held[action.chunk] += 1 if action.kind == FORWARD else -1
        most[action.chunk] = max(most[action.chunk], held[action.chunk])
    return [most[chunk] for chunk in range(len(most))]


def followed_at_once(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """Chunk and micro-batch of those forward passes of a rank that their backward pass follows as its next action. It would be of
    no use to recompute them."""
    return {
        (first.chunk, first.micro_batch)
        for first, then in itertools.pairwise(actions)
        if (then.kind, then.chunk, then.micro_batch) == (BACKWARD, first.chunk, first.micro_batch)
    }


class Span(NamedTuple):
    """An action, and the seconds since the beginning of the step at which it starts and ends."""

    action: Action
    start: float
    end: float


def timeline(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> list[list[Span]]:
    """For each rank the times of its actions, where messages take no time.

    Args:
        forward, backward: the seconds of a forward and of a backward pass (with its recomputation) through each chunk.

    Raises:
        ValueError: the ranks wait for each other without an end.
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
    """The share of a step's time that ranks wait, of 1."""
    last = max(rank[-1].end for rank in spans)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1 - busy / (last * len(spans)) if last else 0.0
