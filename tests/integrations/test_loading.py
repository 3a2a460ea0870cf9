"""Workers of loaders under HorovodStrategy: what they draw depends on the global seed, the epoch and the rank, for any sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


KINDS = ("shuffle", "weighted", "batches", "iterable", "persistent", "generator", "init")


def loader(kind: str) -> DataLoader:
    own = {"batch_size": 2, "sampler": None if kind == "iterable" else RandomSampler(range(SAMPLES))}
    own |= {
        "shuffle": {"sampler": None, "shuffle": True},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
        "batches": {"batch_size": 1, "sampler": None, "batch_sampler": Batches()},
        "persistent": {"persistent_workers": True},
        "generator": {"sampler": None, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "init": {"worker_init_fn": lambda number: None},
    }.get(kind, {})
    return DataLoader(Stream() if kind == "iterable" else Augmented(), num_workers=1, **own)


def fit(kind: str, seed: int, resume: Any = None, **settings: Any) -> dict[int, list[list[float]]]:
    pl.seed_everything(seed, verbose=False)
    module = Module()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **settings}
    own = kind not in ("shuffle", "iterable")
    trainer = pl.Trainer(
        strategy=HorovodStrategy(), accelerator="cpu", use_distributed_sampler=not own, **settings
    )
    trainer.fit(module, loader(kind), ckpt_path=resume)
    return module.seen


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_new_in_each_epoch_on_each_rank_and_for_each_seed(kind: str) -> None:
    runs = [fit(kind, seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    mine = [runs[0][0], runs[0][1]] + ([] if kind == "generator" else [runs[2][0], runs[2][1]])
    numbers = [
        value for part in hc.allgather_object(mine) for epoch in part for row in epoch for value in row
    ]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("kind", ["weighted", "generator", "batches"])
def test_a_resume_in_the_middle_of_an_epoch_draws_what_follows(kind: str, folder: Any) -> None:
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(kind, 3, enable_checkpointing=True, callbacks=[save])
    hc.barrier()
    batches = len(whole[0]) // 2
    resumed = fit(kind, 3, resume=folder / f"step={batches + batches // 2}.ckpt")
    assert resumed == {1: whole[1][2 * (batches // 2) :]}
