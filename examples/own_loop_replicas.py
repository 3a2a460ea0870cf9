"""A loop of your own that ends in the same bits on 1, 2, 4 or 8 ranks: logical replicas, micro-batches, snapshots.

OMP_NUM_THREADS=1 horovodrun -np 2 python examples/own_loop_replicas.py
"""

import hashlib
import sys

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hvd_ckpt as hc

REPLICAS = 8


@click.command()
@click.option("--folder", default="runs/own_loop_replicas", show_default=True)
@click.option("--epochs", default=3, show_default=True)
@click.option("--until", type=int, help="Stop after this step, with a snapshot.")
def main(folder, epochs, until):
    hc.init()
    torch.manual_seed(0)  # rank 0's seed is that of all replicas
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)
    )
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = hc.DistributedOptimizer(
        optimizer, model.named_parameters(), shard="optimizer", model=model, replicas=REPLICAS
    )
    # A loader for each replica of this rank. All are at the same position, which is the same for any number of ranks.
    loaders = [
        hc.data.DataLoader(data, hc.data.DistributedSampler(data, 8, REPLICAS, index, epochs=epochs))
        for index in optimizer.replicas.indices
    ]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loaders[0]))

    def compute(part):
        return functional.cross_entropy(model(part[0]), part[1])

    with hc.Snapshots(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loaders[0]
    ) as snapshots:
        saved = step = snapshots.resume()
        for loader in loaders[1:]:
            loader.load_state_dict(loaders[0].state_dict())
        for batches in zip(*loaders):
            optimizer.zero_grad()
            losses = []
            for replica, batch in zip(optimizer.local_replicas(), batches):
                with replica:  # its dropout, its batch norm statistics
                    loss, _ = hc.accumulate(compute, batch, 2)  # two micro-batches
                losses.append(loss)
            hc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            loss = optimizer.replicas.mean(losses)
            if hc.rank() == 0 and step % 20 == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
            stop = snapshots.stop_requested() or step == until
            if stop or step % 20 == 0:
                snapshots.save(step)
                saved = step
            if stop:
                break
        if step > saved:
            snapshots.save(step)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    if hc.rank() == 0:
        print(f"step {step}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    sys.exit(snapshots.exit_status)


if __name__ == "__main__":
    main()
