"""Fine-tuning in a loop of your own: frozen layers, layer-wise learning rates, averaged weights, early stopping.

horovodrun -np 2 python examples/fine_tuning.py
"""

import math

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn

import hvd_ckpt as hc


@click.command()
@click.option("--steps", default=1000, show_default=True)
@click.option("--eval-every", default=20, show_default=True)
@click.option("--patience", default=3, show_default=True, help="Evaluations without a lower loss.")
@click.option("--shard", default="none", show_default=True, help="none, optimizer, gradients or parameters.")
def main(steps, eval_every, patience, shard):
    hc.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    data = torch.utils.data.TensorDataset(images[:-400], labels[:-400])
    loader = hc.data.DataLoader(data, hc.data.DistributedSampler(data, batch_size=32))
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    layers[0].requires_grad_(False)  # before the optimizer is distributed
    rates = [
        {"params": layer.parameters(), "lr": 3e-3 * 0.5**depth} for depth, layer in enumerate(layers[:0:-1])
    ]
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(rates), model.named_parameters(), shard=shard, model=model
    )
    average = hc.AveragedWeights(optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    best, waited = math.inf, 0
    for step, (inputs, targets) in zip(range(1, steps + 1), loader):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        average.update_parameters()
        if step % eval_every == 0:
            with torch.no_grad(), average.applied():  # every rank evaluates on the same samples
                loss = functional.cross_entropy(model(images[-400:]), labels[-400:]).item()
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if hc.rank() == 0:
                print(f"step {step}: averaged weights, loss {loss:.4f}", flush=True)
            if waited == patience:
                break  # on every rank


if __name__ == "__main__":
    main()
