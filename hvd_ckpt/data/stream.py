"""The order of samples, a function of seed and epoch alone.

The stream is the epochs' permutations one after the other. A global batch is the next samples of it, and each rank takes
its part of the global batch; so every sample is seen once per epoch, by one rank, whatever the number of ranks. The
position in the data is one integer, the samples consumed, and another number of ranks can go on from it.
"""

from __future__ import annotations

import numpy

from hvd_ckpt.data.dataset import Purpose, check_seed
from hvd_ckpt.data.shuffle import MOST_SAMPLES, Shuffle

__all__ = ["SampleStream"]


class SampleStream:
    """All samples in random order, epoch after epoch.

    Args:
        samples: how many there are.
        seed: of the order, from 0 to 2**63 - 1.
        epochs: after how many the stream ends; without it never.

    Raises:
        ValueError: there are no samples or no epochs, or the seed is none.
    """

    def __init__(self, samples: int, seed: int, epochs: int | None = None) -> None:
        if not 0 < samples <= MOST_SAMPLES:
            raise ValueError(f"a stream of {samples} samples: give 1 to 2**62")
        if epochs is not None and epochs < 1:
            raise ValueError(
                f"a stream of {epochs} epochs: give one at least, or None for one without an end"
            )
        self.samples = samples
        self.seed = check_seed(seed)
        self.epochs = epochs

    @property
    def length(self) -> int | None:
        """Samples in the whole stream; None if it has no end."""
        return None if self.epochs is None else self.samples * self.epochs

    def part(self, position: int, count: int, rank: int, size: int) -> tuple[list[int], list[int]]:
        """What a rank takes of the global batch at a position.

        Args:
            position: samples consumed before, by all ranks together.
            count: samples in the global batch; where the stream ends earlier, it is shorter.
            rank, size: this rank, and how many there are.

        Returns:
            Sample numbers, and the epoch of each. Ranks' parts differ by one sample at most; a rank of a short last
            batch may get none.

        Raises:
            ValueError: no such position, batch or rank.
        """
        if position < 0:
            raise ValueError(f"position {position} in the data: give 0 or more")
        if count < 1:
            raise ValueError(f"a global batch of {count} samples: give one at least")
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: give one from 0 to size - 1")
        end = position + count if self.length is None else min(position + count, self.length)
        if end > 2 * MOST_SAMPLES - 1:
            raise ValueError(f"position {position} in the data is beyond 2**63")
        positions = numpy.arange(position + rank, max(end, position + rank), size, dtype=numpy.int64)
        epochs, offsets = numpy.divmod(positions, self.samples)
        found = numpy.empty_like(offsets)
        for epoch in numpy.unique(epochs):
            here = epochs == epoch
            found[here] = Shuffle(self.samples, self.seed, int(epoch), Purpose.ORDER)(offsets[here])
        return found.tolist(), epochs.tolist()
