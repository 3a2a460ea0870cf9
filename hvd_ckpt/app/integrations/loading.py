"""Loaders of ``torch.utils.data`` whose position is saved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

import hvd_ckpt as hc
from hvd_ckpt.collectives.agreement import of_first_process


class SeededLoader:
    """A loader whose workers are seeded by seed, epoch and rank, whatever its sampler is.

    The seed is that of the loader's generator or of the default one, on rank 0. Nothing is drawn from the default generator, which
    so draws the same numbers after a resume. Persistent workers are seeded once, and so draw others after a resume. Collective.

    Args:
        epoch: returns the number of the epoch that begins.
    """

    def __init__(self, loader: DataLoader[Any], epoch: Callable[[], int]) -> None:
        self._loader, self._epoch = loader, epoch
        self._order = loader.generator  # a sampler may draw from it, too
        seed = torch.initial_seed() if self._order is None else self._order.initial_seed()
        self._seed: int = of_first_process(seed, "hvd_ckpt.loader")
        self._place, self._ended = (0, 0), False  # epoch, and the passes in it that have ended
        self._batches = self._passed_over = 0
        self._drawn = self._order_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Begins with the first batch: a resumed run asks for an iterator before samplers know the epoch.
        yield from self._begin()

    def _order_state(self) -> torch.Tensor | None:
        return None if self._order is None else self._order.get_state()

    def _begin(self) -> Iterator[Any]:
        # Passed over once: the next epoch starts at its beginning.
        self._batches, self._passed_over = self._passed_over, 0
        self._drawn = self._order_state()
        epoch = self._epoch()
        if epoch != self._place[0]:
            self._place = (epoch, 0)
        elif self._ended:  # a shorter loader beside others, which begins again
            self._place = (epoch, self._place[1] + 1)
        self._ended = False
        if self._order is not None:
            # As PyTorch does for its workers.
            torch.empty((), dtype=torch.int64).random_(generator=self._order)
        key = f"{self._seed} {self._place} {hc.rank()}"
        # Hashed, since PyTorch adds the number of a worker: ranks and epochs must not be neighbours.
        digest = hashlib.sha256(key.encode()).digest()
        self._loader.generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        try:
            batches = self._counted(iter(self._loader))  # which draws the seed of its workers
        finally:
            self._loader.generator = self._order
        for _ in range(self._batches):
            next(batches)
        return batches

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        skipped = self._batches
        for number, batch in enumerate(batches, start=1):
            self._batches = max(number, skipped)
            yield batch
        self._ended = True


class ResumableLoader(SeededLoader):
    """A loader of numbered samples that begins, after a resume, behind the batches of an epoch that it has returned.

    Batches that are skipped are loaded, so that random augmentation continues as in an undisturbed run.

    Args:
        is_last: whether the batch that was given last is the last one of its epoch.
    """

    def __init__(
        self, loader: DataLoader[Any], epoch: Callable[[], int], is_last: Callable[[], bool]
    ) -> None:
        super().__init__(loader, epoch)
        self._is_last = is_last

    def state_dict(self) -> dict[str, Any]:
        """Seed, and the number of batches of the epoch that the loader has returned; batches of the next epoch are not counted."""
        is_last = self._is_last()
        return {
            "batches": 0 if is_last else self._passed_over or self._batches,
            "seed": self._seed,
            "place": list(self._place),
            "order": self._order_state() if is_last else self._drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins behind as many."""
        self._passed_over, self._seed = state["batches"], state["seed"]
        self._place, self._ended = tuple(state["place"]), False
        if self._order is not None and state["order"] is not None:
            self._order.set_state(state["order"])
            self._drawn = state["order"]
