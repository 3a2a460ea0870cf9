"""DenseNet on images: without recomputation, in segments, or in the efficient variant, which recomputes inside each layer.

    horovodrun -np 2 python examples/memonger_densenet.py --depth 100 --efficient

The memory of DenseNet grows with the square of its depth, unless concatenations, norms and activations are recomputed
(Pleiss et al., "Memory-efficient implementation of DenseNets", 2017). Batch norms normalize by the micro-batch, and deferred ones
collect the running statistics of the whole batch. Images are scikit-learn's digits, or a folder of folders by class.
"""

import copy
import time
from functools import partial

import click
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--depth", default=100, help="22, 100, 121, 161, 169, 201 or 264.")
@click.option("--efficient", is_flag=True, help="Recompute inside each layer instead of in segments.")
@click.option("--segments", type=click.IntRange(1), default=6)
@click.option("--micro-batches", type=click.IntRange(1), default=2)
@click.option("--images", help="Folder or .npz file; without it digits.")
@click.option("--pixels", type=click.IntRange(8), default=32)
@click.option("--batch", type=click.IntRange(2), default=32, help="Images of each rank in a step.")
@click.option("--steps", type=click.IntRange(1), default=50)
def main(depth, efficient, segments, micro_batches, images, pixels, batch, steps):
    hc.init()
    options = {"efficient": efficient}
    config = hc.training.Config(
        f"densenet-{depth}", model_options=options, data=images and f"images:{images}", pixels=pixels
    )
    model, _, data, _ = hc.training.assemble(config)
    device = hc.local_device()
    model = model if efficient else hc.CheckpointSequential(model, segments)
    model = hc.DeferredBatchNorm.convert(model).to(device)

    def backward(whole, model, checkpoint="always"):
        def loss_of(part):
            return torch.nn.functional.cross_entropy(model(*part.inputs), part.targets)

        return hc.accumulate(loss_of, whole.to(device), micro_batches, checkpoint=checkpoint).loss

    sample, trial = data.batch(range(batch), [0] * batch), copy.deepcopy(model)
    for checkpoint in ("never", "always"):
        peak = hc.measure_peak(partial(backward, sample, trial, checkpoint), device).peak_bytes
        start = time.perf_counter()
        backward(sample, trial, checkpoint).item()
        seconds = time.perf_counter() - start
        if hc.rank() == 0:
            print(f"recomputed {checkpoint}: peak {peak / 2**20:.1f} MiB, {seconds:.3f} s a step")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    for step, whole in zip(range(1, steps + 1), batches(data, batch)):
        optimizer.zero_grad()
        loss = backward(whole, model)
        hc.commit_batch_norm(model, across_ranks=True)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            loss = hc.allreduce(loss, name="loss")
            if hc.rank() == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)


def batches(data, batch):
    """This rank's batches, epoch after epoch."""
    sampler = DistributedSampler(data, hc.size(), hc.rank())
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for chosen in BatchSampler(sampler, batch, drop_last=True):
            yield data.batch(chosen, [epoch] * batch)


if __name__ == "__main__":
    main()
