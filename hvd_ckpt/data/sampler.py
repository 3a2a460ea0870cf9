"""Order of samples, which depends on seed and epoch only, and loaders of the batches of one rank.

The permutations of the epochs follow one another and form one sequence. A global batch is the next samples of this sequence, and
rank r of n gets every n-th of them, from the r-th on. So each sample goes to one rank, once per epoch, with any number of ranks.
The position in the data is one integer, the number of samples consumed, from which any number of ranks can resume.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import horovod.torch as hvd
import numpy
import torch
from numpy.typing import NDArray

from hvd_ckpt.data.dataset import Dataset, Purpose, generator
from hvd_ckpt.data.objectives import Batch

PREFETCHED = 2  # batches


class DistributedSampler(torch.utils.data.Sampler[list[int]]):
    """A ``batch_sampler`` of the batches of one rank, which can resume. It yields all samples in random order, epoch after epoch.

    It replaces ``torch.utils.data.DistributedSampler`` and its ``set_epoch``. The epochs follow one another, and a global batch is
    the next ``batch_size * num_replicas`` samples. So the position is one number, from which any number of ranks can resume.
    Iteration starts at the position and yields whole batches; the samples that do not fill a last batch are left out.

    Use it with :class:`DataLoader`. PyTorch's own asks for batches ahead of the loop, so the position would be ahead of the loop.

    Args:
        dataset: the data set, or the number of its samples.
        batch_size: number of samples of each rank in a batch.
        num_replicas, rank: number of ranks and this rank; by default those of the job or of one pipeline stage.
        seed: seed of the order, from 0 to 2**63 - 1.
        epochs: number of epochs; None for an endless sequence.
        shuffle: whether the order is random. If not, each epoch has the order of the data set.

    Attributes:
        position: number of samples that all ranks together have consumed.
        samples: number of samples in the data set.
        length: number of samples in the whole sequence; None if it is endless.

    Raises:
        ValueError: there are no samples, or an argument is invalid.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        samples = dataset if isinstance(dataset, int) else len(dataset)
        if samples < 1:
            raise ValueError("the data set has no samples: give at least one")
        optional = {"epochs": epochs, "num_replicas": num_replicas}
        given = {name: value for name, value in optional.items() if value is not None}
        for name, value in {"batch_size": batch_size, **given}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number from 1, got {value!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be a number from 0 to 2**63 - 1, got {seed!r}")
        self.samples, self.seed, self.epochs = samples, seed, epochs
        self.batch_size, self._num_replicas, self._rank = batch_size, num_replicas, rank
        # This rank of the job may be none of as many.
        is_given = rank is not None or (num_replicas is not None and hvd.is_initialized())
        if is_given and not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank must be from 0 to num_replicas - 1, got {self.rank} of {self.num_replicas}"
            )
        self.length = None if epochs is None else samples * epochs
        self.position = 0
        self._shuffle = shuffle
        self._cached: tuple[int, NDArray[numpy.integer]] | None = None

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        ranks: int = hvd.size() if self._num_replicas is None else self._num_replicas
        return ranks

    @property
    def global_batch(self) -> int:
        """Number of samples that all ranks together take at a time."""
        return self.batch_size * self.num_replicas

    @property
    def rank(self) -> int:
        """This rank."""
        rank: int = hvd.rank() if self._rank is None else self._rank
        return rank

    def __iter__(self) -> Iterator[list[int]]:
        position, count = self.position, self.global_batch
        while self.length is None or position + count <= self.length:
            batch, _ = self.part(position, count, self.rank, count // self.batch_size)
            # Before the batch is given away: a loop that saves its state has consumed this batch, and resumes with the next one.
            position = self.position = position + count
            yield batch

    def __len__(self) -> int:
        """The number of batches in the whole sequence.

        Raises:
            TypeError: the sequence is endless.
        """
        if self.length is None:
            raise TypeError("a DistributedSampler without epochs has no length: give epochs")
        return self.length // self.global_batch

    def state_dict(self) -> dict[str, int]:
        """The position, and the order that it is valid for."""
        of_order = {"samples": self.samples, "seed": self.seed, "shuffle": int(self._shuffle)}
        return {"position": self.position, **of_order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes from a position, with any number of ranks.

        Raises:
            ValueError: the position is for another number of samples or another order, or is not one.
        """
        for name, here in self.state_dict().items():
            if name != "position" and state.get(name, here) != here:
                raise ValueError(
                    f"DistributedSampler: the state is of {name} {state[name]!r}, and here it is {here}: give the same data, seed "
                    "and shuffle"
                )
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise ValueError(
                f"DistributedSampler: the state has the position {position!r}, which must be a number from 0"
            )
        self.position = position

    def part(self, position: int, count: int, rank: int, size: int) -> tuple[list[int], list[int]]:
        """One rank's part of the global batch at a position.

        Args:
            position: number of samples that all ranks together have consumed before.
            count: number of samples in the global batch, which is shorter at the end of the sequence.
            rank, size: this rank, and the number of ranks.

        Returns:
            The sample numbers and the epoch of each sample. The parts of two ranks differ by at most one sample. A rank may get no
            sample of a short last batch.
        """
        # With 5 samples, 2 ranks and global batches of 4:
        #
        #     position    0 1 2 3   4 5 6 7   8 9      where batches end does not depend on the epochs
        #     epoch       0 0 0 0   0 1 1 1   1 1
        #     rank        0 1 0 1   0 1 0 1   0 1
        #
        # Sample numbers are the permutation of the epoch at the offset in the epoch, position % 5.
        end = position + count if self.length is None else min(position + count, self.length)
        positions = numpy.arange(position + rank, max(end, position + rank), size)
        epochs, offsets = numpy.divmod(positions, self.samples)
        numbers = offsets
        # `numbers` is `offsets` and is written in place: the positions of an
        # epoch are read before they are written, and by that epoch alone.
        for epoch in numpy.unique(epochs) if self._shuffle else ():
            here = epochs == epoch
            numbers[here] = self._permutation(int(epoch))[offsets[here]]
        return numbers.tolist(), epochs.tolist()

    def batches_left(self, position: int, count: int) -> int | None:
        """The number of global batches of ``count`` samples from a position on; None for an endless sequence."""
        return None if self.length is None else -(-max(self.length - position, 0) // count)

    def _permutation(self, epoch: int) -> NDArray[numpy.integer]:
        if self._cached is None or self._cached[0] != epoch:
            numbers = numpy.arange(self.samples, dtype=numpy.uint32 if self.samples < 2**32 else numpy.int64)
            self._cached = epoch, generator(Purpose.ORDER, self.seed, epoch).permutation(numbers)
        return self._cached[1]


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` that can resume: its position is that of the loop, however far its workers have loaded
    ahead.

    Its state is the position of its ``batch_sampler`` after the last yielded batch. Each iteration seeds the workers by seed,
    position and rank (persistent workers once). PyTorch's own draws the seed from the default generator, after which dropout would
    draw other numbers in a resumed run. The random state of workers is not part of the state, so random augmentation should depend
    on the number of the sample.

    Args:
        dataset: a map-style data set.
        batch_sampler: a :class:`DistributedSampler`.
        options: further arguments of ``torch.utils.data.DataLoader``, such as ``num_workers``.

    Raises:
        TypeError: ``batch_sampler`` is not a :class:`DistributedSampler`.
    """

    batch_sampler: DistributedSampler
    generator: torch.Generator

    def __init__(self, dataset: Any, batch_sampler: DistributedSampler, **options: Any) -> None:
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"DataLoader: batch_sampler is a {type(batch_sampler).__name__}: give an hc.data.DistributedSampler"
            )
        if options.get("generator") is None:
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_sampler=batch_sampler, **options)

    def __iter__(self) -> Any:
        sampler = self.batch_sampler
        position = sampler.position
        # A generator of its own, seeded by the position: PyTorch's loader draws the
        # seeds of its workers from it, and a resumed run draws the same.
        self.generator.manual_seed((sampler.seed + position) * 100_003 % 2**63 + sampler.rank)
        for batch in super().__iter__():
            # The workers' batches are requested ahead, which has moved the
            # sampler's position on. It is set back to the one of the loop.
            position = sampler.position = position + sampler.global_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The state of the sampler."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes from a position in the next iteration.

        Raises:
            ValueError: as in :meth:`DistributedSampler.load_state_dict`.
        """
        self.batch_sampler.load_state_dict(state)


def batches_of_rank(
    dataset: Dataset,
    sampler: DistributedSampler,
    batch: int,
    rank: int,
    size: int,
    position: int = 0,
    parts: int = 1,
) -> Generator[tuple[list[tuple[Batch, int]], int], None, None]:
    """The parts of a rank of each global batch, to the end of the sampler's sequence, and the position after them.

    A part is ``(batch, samples)``, where ``samples`` is the length of the batch. It is 0 for a part that gets no sample of a short
    last global batch. Such a part has the first sample of the global batch, so that it can take part in the step, with a weight of
    0.

    A thread loads the next two batches while the model computes the current one. (A process beside Horovod would have to import
    everything again.) ``close()`` of the generator ends it. An error in the thread is raised when its batch is requested, and ends
    the iteration.

    Args:
        dataset: the data set, whose ``batch`` runs in the thread.
        sampler: the order of its samples.
        batch: number of samples in each part of a global batch.
        rank, size: this rank, and the number of ranks.
        position: number of samples that all ranks together have consumed before.
        parts: number of consecutive parts of each global batch that a rank has: its logical replicas, or 1.
    """
    own, count = range(rank * parts, (rank + 1) * parts), batch * size * parts
    end = sys.maxsize if sampler.length is None else sampler.length
    starts = range(position, end, count)

    def make(position: int, part: int) -> tuple[Batch, int]:
        indices, epochs = sampler.part(position, count, part, size * parts)
        samples = len(indices)
        if not samples:
            indices, epochs = sampler.part(position, 1, 0, 1)
        return dataset.batch(indices, epochs), samples

    # One thread: batches are made in their order, and the permutation that the sampler caches needs no lock.
    thread = ThreadPoolExecutor(1, "hvd_ckpt loader")
    try:
        requests = (thread.submit(make, start, part) for start in starts for part in own)
        requested = deque(itertools.islice(requests, PREFETCHED))
        for start in starts:
            made = []
            for _ in own:
                made.append(requested.popleft().result())
                requested.extend(itertools.islice(requests, 1))
            yield made, min(start + count, end)
    finally:
        thread.shutdown(cancel_futures=True)
