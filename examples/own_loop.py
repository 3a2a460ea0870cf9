"""A training loop of your own that saves, stops and resumes in the same bits: ``hc.Snapshots`` and ``hc.data.DistributedSampler``.

horovodrun -np 2 python examples/own_loop.py
"""

import sys

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hvd_ckpt as hc


@click.command()
@click.option("--folder", default="runs/own_loop", show_default=True)
@click.option("--epochs", default=3, show_default=True)
@click.option("--save-every", default=20, show_default=True, help="Steps between two snapshots.")
@click.option("--shard", default="none", show_default=True, help="none, optimizer, gradients or parameters.")
def main(folder, epochs, save_every, shard):
    hc.init()
    torch.manual_seed(hc.rank())
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))
    sampler = hc.data.DistributedSampler(data, batch_size=16, seed=0, epochs=epochs)
    loader = hc.data.DataLoader(data, sampler)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)
    )
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), model.named_parameters(), shard=shard, model=model
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    with hc.Snapshots(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, keep=2
    ) as snapshots:
        saved = step = snapshots.resume()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if hc.rank() == 0 and (step == 2 or step % save_every == 0):
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            stop = snapshots.stop_requested()
            if stop or step % save_every == 0:
                snapshots.save(step)
                saved = step
            if stop:
                break
        if step > saved:
            snapshots.save(step)
    sys.exit(snapshots.exit_status)


if __name__ == "__main__":
    main()
