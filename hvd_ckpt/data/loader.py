"""Batches for one rank, the next ones prepared in a thread while the model works on this one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.stream import SampleStream
from hvd_ckpt.models.batch import Batch

__all__ = ["Loader"]

AHEAD = 2  # batches prepared before they are asked for


class Loader:
    """Iterates over ``(batch, samples)``, a rank's part of each global batch, to the end of the stream.

    ``samples`` is the length of the batch, or 0 for a rank that gets no sample of a short last global batch: its batch
    then holds the first sample of the global batch, so that it can take part in the step, with a weight of 0.

    Used as a context manager, or closed by :meth:`close`, it ends its thread. What makes a batch fail in the thread
    is raised where the batch is asked for, and the iteration is over.

    Args:
        dataset: where batches come from; its ``batch`` runs in the thread.
        stream: the order of its samples.
        batch: samples in each rank's part of a global batch.
        rank, size: this rank, and how many there are.
        position: samples consumed before, by all ranks together.

    Raises:
        ValueError: a batch without samples, no such rank or position, or a stream of other samples than the data set's.
    """

    def __init__(
        self, dataset: Dataset, stream: SampleStream, batch: int, rank: int, size: int, position: int = 0
    ) -> None:
        if batch < 1:
            raise ValueError(f"a batch of {batch} samples: give one at least")
        if stream.samples != len(dataset):
            raise ValueError(f"a stream of {stream.samples} samples for a data set of {len(dataset)}")
        stream.part(position, batch * size, rank, size)
        self._position = position
        self._queue: SimpleQueue[_Prepared] = SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._stop = threading.Event()
        source = _Source(dataset, stream, batch, rank, size)
        # The thread must not hold the loader: one that is dropped without close() ends its thread as well.
        self._thread = threading.Thread(
            target=_prepare,
            args=(source, position, self._queue, self._room, self._stop),
            name="hvd_ckpt loader",
            daemon=True,
        )
        self._close = weakref.finalize(self, _end, self._room, self._stop)
        self._thread.start()

    @property
    def position(self) -> int:
        """Samples consumed by all ranks together, up to the batch handed out last; what is prepared does not count."""
        return self._position

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        return self

    def __next__(self) -> tuple[Batch, int]:
        if self._stop.is_set():
            raise StopIteration
        prepared = self._queue.get()
        if prepared.batch is None:
            self.close()
            if prepared.error is not None:
                raise prepared.error
            raise StopIteration
        self._room.release()
        self._position = prepared.position
        return prepared.batch, prepared.samples

    def close(self) -> None:
        """Ends the thread; the iteration is over."""
        self._close()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Prepared(NamedTuple):
    """A batch, or the end, and the position after it."""

    batch: Batch | None
    samples: int
    position: int
    error: BaseException | None = None


class _Source(NamedTuple):
    """A rank's part of the stream."""

    dataset: Dataset
    stream: SampleStream
    batch: int
    rank: int
    size: int

    def at(self, position: int) -> _Prepared:
        count = self.batch * self.size
        left = count if self.stream.length is None else self.stream.length - position
        if left <= 0:
            return _Prepared(None, 0, position)
        indices, epochs = self.stream.part(position, count, self.rank, self.size)
        samples = len(indices)
        if not samples:
            indices, epochs = self.stream.part(position, 1, 0, 1)
        batch = self.dataset.batch(indices, epochs)
        return _Prepared(batch, samples, position + min(left, count))


def _prepare(
    source: _Source,
    position: int,
    queue: SimpleQueue[_Prepared],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    while True:
        room.acquire()
        if stop.is_set():
            return
        try:
            prepared = source.at(position)
        except BaseException as error:
            prepared = _Prepared(None, 0, position, error)
        queue.put(prepared)
        if prepared.batch is None:
            return
        position = prepared.position


def _end(room: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    room.release()
