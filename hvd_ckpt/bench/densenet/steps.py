"""One contender in training: whole steps, their seconds and their peak, and what they have made of the model."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_ckpt.bench.densenet.contenders import CLASSES, Contender, loss_of
from hvd_ckpt.bench.densenet.job import Entry, Job
from hvd_ckpt.distributed import DistributedOptimizer
from hvd_ckpt.measure import no_collection, now
from hvd_ckpt.memory import measure_peak

__all__ = ["Training", "random_batch"]

LEARNING_RATE, MOMENTUM = 0.01, 0.9
CPU = torch.device("cpu")


def random_batch(images: int, pixels: int, seed: int) -> tuple[Tensor, Tensor]:
    """So many images, (images, 3, pixels, pixels), and a label for each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (images, 3, pixels, pixels)
    return torch.randn(shape, generator=generator), torch.randint(CLASSES, (images,), generator=generator)


class Training:
    """A contender with an optimizer of its own; every rank must take the same steps of the same contenders in the same order.

    Attributes:
        entry: what has been found out.
    """

    def __init__(self, contender: Contender, job: Job) -> None:
        assert contender.forward is not None
        self.entry = Entry(contender.name, contender.family)
        self.model = contender.model
        self._forward = contender.forward
        self._job = job
        self._taken = 0
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
            named_parameters=self.model.named_parameters(),
        )

    def step(self) -> None:
        """One step that is not measured."""
        self._step(*self._begin())

    def show_peak(self) -> None:
        """One step for its peak."""
        images, labels = self._begin()
        self.entry.peak_bytes = measure_peak(lambda: self._step(images, labels)).peak_bytes

    def against_the_clock(self) -> None:
        """One step for its seconds, which begins on all ranks at once."""
        images, labels = self._begin()
        hvd.barrier()
        with no_collection():
            start = now(CPU)
            self._step(images, labels)
            self.entry.seconds.append(now(CPU) - start)

    def compare(self, other: Training) -> None:
        """Notes what differs, by a single bit, from another's model."""
        pairs = {
            "weights": (self.model.parameters(), other.model.parameters()),
            "batch norm statistics": (self.model.buffers(), other.model.buffers()),
        }
        self.entry.differences = [what for what, (ours, theirs) in pairs.items() if not _equal(ours, theirs)]

    def _begin(self) -> tuple[Tensor, Tensor]:
        gc.collect()
        self._taken += 1
        seed = self._taken * self._job.size + hvd.rank()  # the same for every contender
        return random_batch(self._job.images, self._job.pixels, seed)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad(
            set_to_none=False
        )  # gradients stay where they are, in the buckets of the reducer
        loss_of(self._forward, images, labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def _equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
