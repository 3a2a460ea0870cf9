"""Lightning's Trainer, in which rank 1 fails: ``horovodrun -np 2 python lightning_errors.py WHERE FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.lightning import HorovodStrategy

where, folder = sys.argv[1:]
hc.init()


def fail(here: str) -> None:
    if where != here or hc.rank() != 1:
        return
    if where == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    raise {"interrupt": KeyboardInterrupt(), "exit": SystemExit(3)}.get(where, ValueError("a bad sample"))


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> torch.Tensor:
        if number > 10:
            fail("worker")
        return torch.ones(4)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            for here in ("step", "signal", "interrupt", "exit"):
                fail(here)
        return self.net(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        fail("validation")
        self.log("val", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Fails(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        fail("callback")

    def on_save_checkpoint(self, *_: Any) -> None:
        fail("saving")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if where == "callback":
            trainer.save_checkpoint(f"{folder}/own.ckpt")  # as a callback of a user's may


saves = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=2)
trainer = pl.Trainer(
    strategy=HorovodStrategy(), accelerator="cpu", max_epochs=1, logger=False,
    callbacks=[Fails(), OnExceptionCheckpoint(folder), saves],
    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
loader = DataLoader(Samples(), 2, num_workers=int(where == "worker"))
trainer.fit(Module(), loader, DataLoader(torch.ones(8, 4), 2))
