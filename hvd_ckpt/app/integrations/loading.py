"""Loaders of ``torch.utils.data`` whose position is saved, and that give a rank the batches of its logical replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

import hvd_ckpt as hc


class ResumableLoader:
    """A loader of numbered samples that counts the batches of an epoch, and begins behind as many after a resume.

    Batches that are skipped are loaded, so that random augmentation continues as in an undisturbed run. Workers are seeded by
    epoch and rank, not by the default generator, which so draws the same numbers after a resume.

    Args:
        is_last: whether the batch that was given last is the last one of its epoch.
    """

    def __init__(self, loader: DataLoader[Any], is_last: Callable[[], bool]) -> None:
        self._loader, self._is_last = loader, is_last
        self._batches = self._passed_over = 0
        self._seeds = loader.generator is None
        if self._seeds:
            loader.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._seeds:
            generator = self._loader.generator
            generator.manual_seed(getattr(self.sampler, "epoch", 0) * 100_003 + hc.rank())
        # Passed over once: the next epoch starts at its beginning.
        self._batches, self._passed_over = self._passed_over, 0
        batches = iter(self._loader)
        for _ in range(self._batches):
            next(batches)
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Number of batches of the epoch that the loader has returned; batches of the next epoch are not counted."""
        return {"batches": 0 if self._is_last() else self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration begins behind as many."""
        self._passed_over = state["batches"]


def local_replicas(replicas: int, ranks: int) -> int:
    """The number of logical replicas that a rank has."""
    return max(replicas // ranks, 1)


class OwnBatches:
    """A rank's batches: in each step the next ``replicas`` batches of the order are those of the replicas.

    A last step that is not full is left out.
    """

    def __init__(self, batches: Any, replicas: int) -> None:
        self._batches, self._replicas = batches, replicas
        local = local_replicas(replicas, hc.size())
        self._own = range(hc.rank() * local, (hc.rank() + 1) * local)

    def __len__(self) -> int:
        return len(self._batches) // self._replicas * len(self._own)

    def __iter__(self) -> Iterator[Any]:
        steps = len(self._batches) // self._replicas
        for number, batch in enumerate(islice(self._batches, steps * self._replicas)):
            if number % self._replicas in self._own:
                yield batch


def take_own_batches(loader: DataLoader[Any], replicas: int) -> None:
    """Has a loader give this rank the batches of its logical replicas, one after the other."""
    # A loader refuses this attribute to be set after its construction.
    vars(loader)["batch_sampler"] = OwnBatches(loader.batch_sampler, replicas)
