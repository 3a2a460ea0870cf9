"""The order of samples, a function of seed and epoch alone, and a loader of one rank's batches.

The epochs' permutations follow one another. A global batch is the next samples of that sequence, and rank r takes every size-th of
them from the r-th on; so each sample is seen once in an epoch, by one rank, whatever the number of ranks. The position in the data
is one integer, the number of samples consumed, and any number of ranks can resume from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

from hvd_ckpt.data.dataset import Dataset, Purpose, generator
from hvd_ckpt.models.objectives import Batch

PREFETCHED = 2  # batches


class Sampler:
    """All samples in random order, epoch after epoch.

    Args:
        samples: their number.
        seed: of the order, from 0 to 2**63 - 1.
        epochs: the number of epochs; None for a sequence without an end.

    Attributes:
        length: samples in the whole sequence; None if it has no end.

    Raises:
        ValueError: there are no samples.
    """

    def __init__(self, samples: int, seed: int, epochs: int | None = None) -> None:
        if samples < 1:
            raise ValueError("the data set has no samples: give at least one")
        self.samples, self.seed, self.epochs = samples, seed, epochs
        self.length = None if epochs is None else samples * epochs
        self._cached: tuple[int, NDArray[numpy.integer]] | None = None

    def part(self, position: int, count: int, rank: int, size: int) -> tuple[list[int], list[int]]:
        """One rank's part of the global batch at a position.

        Args:
            position: samples that all ranks together have consumed before.
            count: samples in the global batch; it is shorter where the sequence ends.
            rank, size: this rank, and the number of ranks.

        Returns:
            Sample numbers, and the epoch of each. The parts of two ranks differ by at most one sample; a rank may get none of a
            short last batch.
        """
        end = position + count if self.length is None else min(position + count, self.length)
        positions = numpy.arange(position + rank, max(end, position + rank), size)
        epochs, offsets = numpy.divmod(positions, self.samples)
        found = numpy.empty_like(offsets)
        for epoch in numpy.unique(epochs):
            here = epochs == epoch
            found[here] = self._permutation(int(epoch))[offsets[here]]
        return found.tolist(), epochs.tolist()

    def batches_left(self, position: int, count: int) -> int | None:
        """The number of global batches of ``count`` samples from a position on; None if there is no end."""
        return None if self.length is None else -(-max(self.length - position, 0) // count)

    def _permutation(self, epoch: int) -> NDArray[numpy.integer]:
        if self._cached is None or self._cached[0] != epoch:
            numbers = numpy.arange(self.samples, dtype=numpy.uint32 if self.samples < 2**32 else numpy.int64)
            self._cached = epoch, generator(Purpose.ORDER, self.seed, epoch).permutation(numbers)
        return self._cached[1]


class Loader:
    """Iterates over ``(batch, samples)``, a rank's parts of each global batch in turn, to the end of the sampler's sequence.

    The next two batches are made in a thread while the model works on this one: a process started beside Horovod would have to
    import everything again. ``samples`` is the length of the batch, or 0 for a part that gets no sample of a short last global
    batch: it then holds the first sample of the global batch, so that it can take part in the step, with a weight of 0.

    A context manager; :meth:`close` ends the thread. An error in the thread is raised where its batch is asked for, and ends the
    iteration.

    Args:
        dataset: its ``batch`` runs in the thread.
        sampler: the order of its samples.
        batch: samples in each part of a global batch.
        rank, size: this rank, and the number of ranks.
        position: samples that all ranks together have consumed before.
        parts: consecutive parts of each global batch that a rank has: its logical replicas, or 1.

    Attributes:
        position: samples that all ranks together have consumed, up to the global batch whose last part was returned last.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        batch: int,
        rank: int,
        size: int,
        position: int = 0,
        parts: int = 1,
    ) -> None:
        self.position = position
        self._dataset, self._sampler = dataset, sampler
        self._own, self._parts = range(rank * parts, (rank + 1) * parts), size * parts
        self._count = batch * self._parts
        self._requested, self._next, self._returned = position, 0, 0
        self._thread = ThreadPoolExecutor(1, "hvd_ckpt loader")
        self._batches: deque[Future[tuple[Batch, int]]] = deque()
        for _ in range(PREFETCHED):
            self._request()

    def _end(self, position: int) -> int:
        end, length = position + self._count, self._sampler.length
        return end if length is None else min(end, length)

    def _request(self) -> None:
        end = self._end(self._requested)
        if end > self._requested:
            self._batches.append(self._thread.submit(self._make, self._requested, self._own[self._next]))
            self._next = (self._next + 1) % len(self._own)
            self._requested = self._requested if self._next else end

    def _make(self, position: int, part: int) -> tuple[Batch, int]:
        indices, epochs = self._sampler.part(position, self._count, part, self._parts)
        samples = len(indices)
        if not samples:
            indices, epochs = self._sampler.part(position, 1, 0, 1)
        return self._dataset.batch(indices, epochs), samples

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        return self

    def __next__(self) -> tuple[Batch, int]:
        if not self._batches:
            self.close()
            raise StopIteration
        try:
            batch = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        self._returned = (self._returned + 1) % len(self._own)
        self.position = self.position if self._returned else self._end(self.position)
        self._request()
        return batch

    def close(self) -> None:
        """Ends the thread and the iteration."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
