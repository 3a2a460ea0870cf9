"""Workers of loaders under HorovodStrategy: what they draw depends on the global seed, the epoch and the rank, for any sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import hvd_ckpt as hc

pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
)
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from hvd_ckpt.app.integrations.lightning import HorovodStrategy

pytestmark = [
    pytest.mark.ranks(gloo=(2,)),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SAMPLES = 8


def draws() -> torch.Tensor:
    """What an augmentation draws, of each generator that PyTorch seeds in its workers."""
    return torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()])


class Augmented(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return draws()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (draws() for _ in range(SAMPLES))


class Batches:
    """A batch sampler without an epoch."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: dict[int, list[list[float]]] = {}

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen.setdefault(self.current_epoch, []).extend(batch.tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


LOADERS: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
    "batches": {"batch_size": 1, "batch_sampler": Batches()},
    "iterable": {"dataset": Stream()},
    "persistent": {"sampler": RandomSampler(range(SAMPLES)), "persistent_workers": True},
    "generator": {"shuffle": True},  # with a generator of its own
    "init": {"sampler": RandomSampler(range(SAMPLES)), "worker_init_fn": lambda number: None},
}
RESUMED = ("weighted", "generator", "batches")


def fit(kind: str, seed: int, resume: Any = None, **settings: Any) -> dict[int, list[list[float]]]:
    pl.seed_everything(seed, verbose=False)
    module = Module()
    own = {"generator": torch.Generator().manual_seed(5)} if kind == "generator" else {}
    loader = DataLoader(**{"dataset": Augmented(), "batch_size": 2, "num_workers": 1, **LOADERS[kind], **own})
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 2, "enable_checkpointing": "callbacks" in settings, **quiet, **settings}
    divided = kind in ("shuffle", "iterable")
    trainer = pl.Trainer(
        strategy=HorovodStrategy(), accelerator="cpu", use_distributed_sampler=divided, **settings
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return module.seen


@pytest.mark.parametrize("kind", LOADERS)
def test_draws_are_new_in_each_epoch_on_each_rank_and_for_each_seed(kind: str, folder: Path) -> None:
    """And a resume in the middle of an epoch draws what follows."""
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    first, again, other = fit(kind, 3), fit(kind, 3, callbacks=[save]), fit(kind, 4)
    assert first == again
    mine = [*first.values(), *(other.values() if kind != "generator" else ())]
    numbers = [
        value for part in hc.allgather_object(mine) for epoch in part for row in epoch for value in row
    ]
    assert len(set(numbers)) == len(numbers)
    if kind in RESUMED:
        hc.barrier()
        batches = len(first[0]) // 2
        resumed = fit(kind, 3, resume=folder / f"step={batches + batches // 2}.ckpt")
        assert resumed == {1: first[1][2 * (batches // 2) :]}
