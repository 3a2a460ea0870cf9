"""A model as a chain of blocks with measured costs, and the cost of a schedule of it.

:func:`simulate` is the definition of time and peak memory that everything else in planning is held against:
the solver's results are simulated before they are returned, and the tests compare it with exhaustive search.

The model extends the one of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019), "Optimal
checkpointing for heterogeneous chains", from one way to run a block to several. Bytes are integers, times are
seconds. A level of a schedule, the whole chain or one segment that is being recomputed, runs its items
forward in order and then backward in reverse order:

- a :class:`Run` of a block holds ``kept`` bytes from its forward to its backward, under the choice taken, and besides
  ``casts`` bytes until the forward pass of the level ends;
- a :class:`Segment` first runs its blocks forward saving nothing, holds only the output of its last block,
  and at its turn in the backward pass is recomputed as a level of its own, while the gradient of that output
  waits beside it. Segments nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One way to run a block.

    Args:
        seconds: forward plus backward of the block, recomputation included.
        kept: bytes held between its forward and its backward, above what was held when it started, its
            output included.
        forward_peak: most bytes during its forward, above the start, its output included.
        backward_peak: most bytes during its backward, above the start of its *forward*: kept bytes, the
            incoming gradient, everything that is recomputed.
        casts: bytes held besides until the forward pass of all blocks ends: what autocast remembers of weights, less what
            ``kept`` has of it.
    """

    seconds: float
    kept: int
    forward_peak: int
    backward_peak: int
    casts: int = 0


@dataclass(frozen=True)
class Block:
    """One block of the chain.

    Args:
        choices: the ways to run it, at least one.
        output: bytes of its output, and so of the gradient of its output.
        forward_seconds: of a forward that saves nothing, the first pass of a recomputed segment.
        forward_working: most bytes during such a forward, above the start, its output included.
        joins_next: whether this block and the next may lie in one recomputed segment. A block that joins
            neither neighbour lies in no segment.
        casts: as those of a choice, of such a forward.
        frame: bytes that a segment which begins here holds until it has been run backward: the state of the random numbers.
    """

    choices: tuple[Choice, ...]
    output: int
    forward_seconds: float
    forward_working: int
    joins_next: bool = False
    casts: int = 0
    frame: int = 0

    def only(self, count: int) -> Block:
        """The block with the first choices alone."""
        return replace(self, choices=self.choices[:count])

    def with_costs(self, change: Callable[[Choice], dict[str, Any]]) -> Block:
        """The block with some costs of each choice changed."""
        return replace(self, choices=tuple(replace(choice, **change(choice)) for choice in self.choices))


@dataclass(frozen=True)
class Run:
    """The block of that index runs under its choice of that index."""

    block: int
    choice: int

    @property
    def first(self) -> int:
        """The block, as that of a segment."""
        return self.block

    @property
    def last(self) -> int:
        """The block, as that of a segment."""
        return self.block


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks that first run forward saving nothing and are recomputed in the backward pass as
    ``items`` say."""

    items: tuple[Run | Segment, ...]

    @property
    def first(self) -> int:
        """Index of the first block in it."""
        return self.items[0].first

    @property
    def last(self) -> int:
        """Index of the last block in it."""
        return self.items[-1].last


Item = Run | Segment


@dataclass(frozen=True)
class Solution:
    """A schedule of the whole chain with its cost by :func:`simulate`: peak bytes above the start of the
    step, and seconds of a step."""

    items: tuple[Item, ...]
    peak: int
    seconds: float


def simulate(blocks: Sequence[Block], items: Sequence[Item], in_flight: int = 1) -> tuple[int, float]:
    """Peak bytes above the start, and seconds, of running ``items``.

    Args:
        in_flight: micro-batches that are held at a time, as in a pipeline stage: while one runs forward or backward, what the
            others keep from their forward to their backward pass is there, too. Seconds are those of one.

    Raises:
        ValueError: if the items do not cover the blocks in order, each once, or if a segment spans blocks
            that do not join.
    """
    walk = _simulate(blocks, items)
    return walk.peak + (in_flight - 1) * walk.kept, walk.seconds


def bottleneck(blocks: Sequence[Block], items: Sequence[Item]) -> int:
    """Index of the block whose forward or backward sets the peak of running ``items`` (the first such)."""
    return _simulate(blocks, items).block


def _simulate(blocks: Sequence[Block], items: Sequence[Item]) -> _Walk:
    walk = _Walk(blocks)
    _check_order(blocks, items, 0, len(blocks))
    walk.kept = walk.level(items, 0, 0)
    return walk


class _Walk:
    """The state of one simulation: the highest peak so far, the block it was at, the time so far, and what is kept from the forward
    to the backward pass of the whole chain."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.peak = 0
        self.block = 0
        self.seconds = 0.0
        self.kept = 0

    def level(self, items: Sequence[Item], base: int, waiting: int) -> int:
        """Forward and backward of ``items`` above ``base`` bytes; returns what is held between them.

        While the forward runs, ``waiting`` bytes of gradient are held outside; the backward consumes them, so its peaks have them
        included. What is held after a forward counts even where a measured peak says less.
        """
        blocks = self.blocks
        starts = []
        held = base
        casts = 0
        for item in items:
            starts.append(held)
            if isinstance(item, Run):
                choice = blocks[item.block].choices[item.choice]
                self.reach(item.block, held + casts + waiting + max(choice.forward_peak, choice.kept))
                held += choice.kept
                casts += choice.casts
            else:
                held += blocks[item.first].frame
                boundary = 0  # the segment's own input is held already by the items before
                for index in range(item.first, item.last + 1):
                    block = blocks[index]
                    working = max(block.forward_working, block.output)
                    self.reach(index, held + casts + boundary + waiting + working)
                    self.seconds += block.forward_seconds
                    boundary = block.output
                    casts += block.casts
                held += boundary
        between = held
        for item, start in zip(reversed(items), reversed(starts)):
            if isinstance(item, Run):
                choice = blocks[item.block].choices[item.choice]
                self.reach(item.block, start + choice.backward_peak)
                self.seconds += choice.seconds
            else:
                self.level(item.items, start + blocks[item.first].frame, blocks[item.last].output)
        return between

    def reach(self, block: int, held: int) -> None:
        if held > self.peak:
            self.peak, self.block = held, block


def _check_order(blocks: Sequence[Block], items: Sequence[Item], start: int, stop: int) -> None:
    """The items cover blocks ``start`` to ``stop - 1``, each once, in order; segments span joined blocks."""
    position = start
    for item in items:
        first = item.first
        if first != position or position >= stop:
            raise ValueError(
                f"block {first} comes where block {position} of {stop} should: list every block once, in order"
            )
        position = item.last + 1
        if isinstance(item, Run):
            if not 0 <= item.choice < len(blocks[first].choices):
                raise ValueError(
                    f"block {first} has no choice {item.choice}: it has {len(blocks[first].choices)} choices"
                )
            continue
        for index in range(first, min(position, stop) - 1):
            if not blocks[index].joins_next:
                raise ValueError(
                    f"a segment spans blocks {index} and {index + 1}, which do not join: split it"
                )
        _check_order(blocks, item.items, first, position)
    if position != stop:
        raise ValueError(f"the items end before block {position} of {stop}: list every block once, in order")
