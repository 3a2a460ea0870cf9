"""DenseNet on images: all kept, recomputed in segments, or the efficient variant, which recomputes inside each layer.

    horovodrun -np 2 python examples/memonger_densenet.py --depth 100 --efficient

What DenseNet keeps grows with the square of its depth, unless concatenations, norms and activations are computed again
(Pleiss et al., "Memory-efficient implementation of DenseNets", 2017). Batch norms see micro-batches here, and deferred ones
gather the running statistics of the whole batch. Images are scikit-learn's digits, or a folder of folders by class.
"""

import copy
import time
from functools import partial

import click
import torch

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.images import open_images
from hvd_ckpt.data.sampler import Sampler
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.densenet import densenet
from hvd_ckpt.models.sizes import DENSENETS
from hvd_ckpt.text import show_bytes


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--depth", type=click.Choice([str(depth) for depth in DENSENETS]), default="100")
@click.option("--efficient", is_flag=True, help="Recompute inside each layer instead of in segments.")
@click.option("--segments", type=click.IntRange(1), default=6)
@click.option("--micro-batches", type=click.IntRange(1), default=2)
@click.option("--images", help="Folder or .npz file; without it digits.")
@click.option("--pixels", type=click.IntRange(8), default=32)
@click.option("--batch", type=click.IntRange(2), default=32, help="Images of each rank in a step.")
@click.option("--steps", type=click.IntRange(1), default=50)
def main(depth, efficient, segments, micro_batches, images, pixels, batch, steps):
    hc.init()
    torch.manual_seed(0)
    try:
        data = open_images(images, pixels)
        model = densenet(int(depth), channels=data.channels, classes=data.classes, efficient=efficient)
        model = model if efficient else hc.CheckpointSequential(model, segments)
    except (ValueError, OSError) as error:
        raise BadArgument(str(error)) from None
    device = torch.device("cuda", hc.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = hc.DeferredBatchNorm.convert(model).to(device)

    def backward(whole, model, checkpoint="always"):
        def loss_of(part):
            return torch.nn.functional.cross_entropy(model(*part.inputs), part.targets)

        return hc.accumulate(loss_of, whole.to(device), micro_batches, checkpoint=checkpoint).loss

    sample, trial = data.batch(range(batch), [0] * batch), copy.deepcopy(model)
    for checkpoint in ("never", "always"):
        peak = measure_peak(partial(backward, sample, trial, checkpoint), device).peak_bytes
        start = time.perf_counter()
        backward(sample, trial, checkpoint).item()
        seconds = time.perf_counter() - start
        if hc.rank() == 0:
            print(f"recomputed {checkpoint}: peak {show_bytes(peak)}, {seconds:.3f} s a step")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    order = Sampler(len(data), seed=0)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        chosen = order.part((step - 1) * batch * hc.size(), batch * hc.size(), hc.rank(), hc.size())
        loss = backward(data.batch(*chosen), model)
        hc.commit_batch_norm(model, across_ranks=True)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            loss = hc.allreduce(loss, name="loss")
            if hc.rank() == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
