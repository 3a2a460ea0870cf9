"""Trains a LightningModule in logical replicas, and writes a hash of its weights: FOLDER [CHECKPOINT]."""

import hashlib
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hvd_ckpt.app.integrations.lightning import HorovodStrategy


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
        )

    def training_step(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder, checkpoint=None):
    pl.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(72, 8, generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HorovodStrategy(replicas=4, shard="optimizer"),
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=6)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(
        model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2, shuffle=True), ckpt_path=checkpoint
    )
    assert trainer.global_step == 18
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    if trainer.is_global_zero:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "hash").write_text(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
