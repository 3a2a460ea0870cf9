"""Model of a chain of blocks with measured costs, and the cost of a schedule of it.

:func:`simulate` defines time and peak memory. The results of the solver are simulated before they are returned, and the tests
compare it with exhaustive search.

The model extends that of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019), "Optimal checkpointing for heterogeneous
chains", from one way to run a block to several. Bytes are integers, times are seconds. A *level* of a schedule is the whole chain
or a segment that is being recomputed. It runs its items forward in order, and then backward in reverse order:

- A :class:`Run` of a block holds ``kept`` bytes from its forward to its backward pass, under the choice taken. It also holds
  ``casts`` bytes until the forward pass of the level ends.
- A segment, which is a tuple of items, first runs its blocks forward without saving anything, and holds only the output of its
  last block. In the backward pass, it is recomputed as a level of its own, while the gradient of that output waits. Segments nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One way to run a block.

    Args:
        seconds: seconds of forward and backward pass, including recomputation.
        kept: bytes held between the forward and the backward pass, above the start of the block, including its output.
        forward_peak: most bytes during the forward pass, above its start, including the output.
        backward_peak: most bytes during the backward pass, above the start of the *forward* pass: kept bytes, the incoming gradient
            and everything that is recomputed.
        casts: further bytes held until the forward pass of all blocks ends: autocast's cache of weights, without what ``kept``
            includes of it.
        policy: the checkpoint policy under which the block runs; choices are equal if their costs are.
    """

    seconds: float
    kept: int
    forward_peak: int
    backward_peak: int
    casts: int = 0
    policy: Any = field(default=None, compare=False)

    @property
    def costs(self) -> tuple[float, int, int, int, int]:
        """All costs."""
        return self.seconds, self.kept, self.forward_peak, self.backward_peak, self.casts

    @property
    def peak(self) -> int:
        """Most bytes during both passes."""
        return max(self.forward_peak, self.backward_peak)


@dataclass(frozen=True)
class Block:
    """One block of the chain.

    Args:
        choices: the ways to run the block, at least one.
        output: bytes of the output, and of the gradient of the output.
        forward_seconds: seconds of a forward pass that saves nothing, which is the first pass of a recomputed segment.
        forward_working: most bytes during such a pass, above its start, including the output.
        joins_next: whether this block and the next may lie in one recomputed segment. A block that joins neither neighbour lies in
            no segment.
        casts: as in :class:`Choice`, for a forward pass that saves nothing.
        frame: bytes that a segment which begins here holds until its backward pass has run: the random state.
    """

    choices: tuple[Choice, ...]
    output: int
    forward_seconds: float
    forward_working: int
    joins_next: bool = False
    casts: int = 0
    frame: int = 0

    def only(self, count: int) -> Block:
        """The block with the first ``count`` choices only."""
        return replace(self, choices=self.choices[:count])

    def with_costs(self, change: Callable[[Choice], dict[str, Any]]) -> Block:
        """The block with each choice changed in the costs that ``change(choice)`` returns."""
        return replace(self, choices=tuple(replace(choice, **change(choice)) for choice in self.choices))


@dataclass(frozen=True)
class Run:
    """Item of a schedule: the block with this index, run under the choice with this index."""

    block: int
    choice: int


# A tuple of items is a segment.
Item = Run | tuple["Item", ...]
# Levels of segments; each takes a dozen of the thousand frames that Python's stack has when it runs.
MAX_NESTING = 64


def span_of(item: Item) -> range:
    """The blocks of an item."""
    if isinstance(item, Run):
        return range(item.block, item.block + 1)
    return range(span_of(item[0]).start, span_of(item[-1]).stop)


def runs_of(item: Item, depth: int = 0) -> Iterator[tuple[Run, int]]:
    """The runs of an item in order, each with the number of segments around it."""
    if isinstance(item, Run):
        yield item, depth
    else:
        for inner in item:
            yield from runs_of(inner, depth + 1)


@dataclass(frozen=True)
class Solution:
    """A schedule of the whole chain with its cost by :func:`simulate`: peak bytes above the start of a step, and its seconds."""

    items: tuple[Item, ...]
    peak: int
    seconds: float


# An example: blocks 0, 1, 2 with an output of 1 byte, one choice (3
# s, 4 bytes kept, a backward peak of 6), and a first pass of 1 s.
#
#     schedule         forward: bytes behind each item    backward: peak of each block          peak    seconds
#     0  1  2          4  8  12                           2: 8 + 6    1: 4 + 6    0: 6          14      9
#     (0 1)  2         1  5                               2: 1 + 6    1: 4 + 6    0: 6          10      11
#     (0) (1)  2       1  2  6                            2: 2 + 6    1: 1 + 6    0: 6          8       11
#     ((0) 1)  2       1  5                               2: 1 + 6    1: 1 + 6    0: 6          7       12
#
# A segment in parentheses leaves its output of 1 byte. In the backward pass, its blocks run forward once more, as a level.
def simulate(blocks: Sequence[Block], items: Sequence[Item], in_flight: int = 1) -> tuple[int, float]:
    """Peak bytes above the start, and seconds, of a schedule.

    Args:
        in_flight: number of micro-batches that are held at a time, as in a pipeline stage. While one of them runs forward or
            backward, the others hold what they keep between their forward and backward passes. Seconds are those of one
            micro-batch.
    """
    walk = _Walk(blocks)
    kept = walk.level(items, 0, 0)
    return walk.peak + (in_flight - 1) * kept, walk.seconds


def all_kept(blocks: Sequence[Block]) -> Solution:
    """The schedule without recomputation."""
    items = tuple(Run(block, 0) for block in range(len(blocks)))
    return Solution(items, *simulate(blocks, items))


def bottleneck(blocks: Sequence[Block], items: Sequence[Item]) -> int:
    """Index of the first block whose forward or backward pass sets the peak of a schedule."""
    walk = _Walk(blocks)
    walk.level(items, 0, 0)
    return walk.block


class _Walk:
    """State of a simulation: the highest peak so far, the block that set it, and the time."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.peak = 0
        self.block = 0
        self.seconds = 0.0

    def level(self, items: Sequence[Item], base: int, waiting: int) -> int:
        """Runs a level forward and backward, from ``base`` bytes on; returns the bytes held between the two.

        The gradient of ``waiting`` bytes waits outside during the forward pass. The backward pass consumes it, and measured
        backward peaks include it.
        """
        # An item starts its backward pass with the bytes with which it started its forward pass, which ``starts`` has. For a run R
        # that is followed by a segment S:
        #
        #     forward     R starts at base      S starts at base + R.kept, and leaves its frame and its output
        #     backward    S is a level of its own at base + R.kept + its frame      R starts at base
        #
        # The waiting gradient and the casts are held throughout the forward pass.
        blocks = self.blocks
        starts = []
        held = base
        casts = 0
        for item in items:
            starts.append(held)
            if isinstance(item, Run):
                choice = blocks[item.block].choices[item.choice]
                # Measured separately, kept may exceed the forward peak.
                self.reach(item.block, held + casts + waiting + max(choice.forward_peak, choice.kept))
                held += choice.kept
                casts += choice.casts
            else:
                inside = span_of(item)
                held += blocks[inside[0]].frame
                boundary = 0  # the items before hold the input of the segment
                for index in inside:
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
                inside = span_of(item)
                self.level(item, start + blocks[inside[0]].frame, blocks[inside[-1]].output)
        return between

    def reach(self, block: int, held: int) -> None:
        """Records the bytes that are held during a pass of a block."""
        if held > self.peak:
            self.peak, self.block = held, block
