"""The batches of a training with the Trainer, divided over the ranks as Accelerate divides them over its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard

import hvd_ckpt as hc
from hvd_ckpt.collectives.agreement import of_first_process

DRAWN_AT_ONCE = 1000  # batches


class DividingAccelerator(Accelerator):
    """An Accelerator of one process that divides loaders over the ranks while one for training is made."""

    _trains = _divides = False

    num_processes = property(lambda self: hc.size() if self._divides else self.state.num_processes)
    process_index = property(lambda self: hc.rank() if self._divides else self.state.process_index)
    dispatch_batches = False  # by torch.distributed

    def for_training(self, make: Callable[[], Any]) -> Any:
        """The loader that a function makes for training."""
        self._trains = True
        try:
            return make()
        finally:
            self._trains = False

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader; one for training is divided, unless its samples are one rank's already."""
        self._divides = self._trains and not _is_of_a_rank(data_loader)
        try:
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        finally:
            self._divides = False
        for shard in (prepared.sampler, prepared.batch_sampler):
            if isinstance(shard, BatchSamplerShard):
                shard.batch_sampler = BatchesOfFirstRank.of(shard.batch_sampler)
        return prepared


class BatchesOfFirstRank:
    """A batch sampler that gives on all ranks what rank 0's draws. Iterating is collective."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    @classmethod
    def of(cls, batch_sampler: Any) -> BatchesOfFirstRank:
        return batch_sampler if isinstance(batch_sampler, cls) else cls(batch_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        drawn = iter(self.batch_sampler)
        while batches := of_first_process(list(islice(drawn, DRAWN_AT_ONCE)), "Trainer: batches"):
            yield from batches


def _is_of_a_rank(loader: Any) -> bool:
    """Whether a sampler of a loader gives the samples of one of the ranks, as a ``DistributedSampler`` does."""
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(getattr(sampler, "num_replicas", None) == hc.size() for sampler in samplers)
