"""From Horovod to this library: one import changes, one line adds recomputation, and the losses stay the same.

    horovodrun -np 2 python examples/migrate_from_horovod.py --version before
    horovodrun -np 2 python examples/migrate_from_horovod.py --version after

`train` is the same in both versions.
"""

import click
import torch
from sklearn.datasets import load_digits
from torch import nn


def before(steps):
    import horovod.torch as hvd

    train(hvd, network(), steps)


def after(steps):
    import hvd_ckpt as hvd  # changed: was horovod.torch

    model = hvd.CheckpointSequential(network(), segments=4)  # added: recomputes three of four segments
    train(hvd, model, steps)


def network():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())  # noqa: E731
    return nn.Sequential(nn.Linear(64, 256), *(block() for _ in range(12)), nn.Linear(256, 10))


def train(hvd, model, steps):
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = torch.utils.data.TensorDataset(images.float() / 16, labels)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
    step = 0
    while step < steps:
        sampler.set_epoch(step // len(loader))
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == steps:
                mean = hvd.allreduce(loss.detach(), name="loss")
                if hvd.rank() == 0:
                    print(f"step {step}: loss {mean.item():.4f}", flush=True)
            if step == steps:
                break


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--version", type=click.Choice(["before", "after"]), default="after")
@click.option("--steps", type=click.IntRange(1), default=100)
def main(version, steps):
    {"before": before, "after": after}[version](steps)


if __name__ == "__main__":
    main()
