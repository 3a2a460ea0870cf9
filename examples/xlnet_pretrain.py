"""XLNet on text: two streams through one chain of blocks, recomputed in segments, with masks that all blocks share.

    horovodrun -np 2 python examples/xlnet_pretrain.py --text FILE --segments 4

A sixth of the tokens is predicted in random order (Yang et al., "XLNet", 2019). The content stream sees a token, the query
stream only its position. Masks and relative positions are computed once for each batch and passed to every block as keyword
arguments. So a recomputation finds those of its own batch, without a global variable.
"""

import click
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import hvd_ckpt as hc

BATCH = 8  # samples of each rank in a step


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option("--steps", type=click.IntRange(1), default=100)
@click.option("--length", type=click.IntRange(8), default=128)
@click.option("--layers", type=click.IntRange(1), default=6)
@click.option("--width", type=click.IntRange(4), default=256, help="A multiple of the 4 heads.")
@click.option("--segments", type=click.IntRange(1), default=4, help="Of the layers, embeddings and head.")
@click.option("--reentrant", is_flag=True, help="Recompute by PyTorch's reentrant variant.")
@click.option("--bf16", is_flag=True, help="Autocast to bfloat16.")
def main(text, steps, length, layers, width, segments, reentrant, bf16):
    hc.init()
    device = hc.local_device()
    sizes = {"width": width, "layers": layers}
    config = hc.training.Config(
        "xlnet-mini", model_options=sizes, data=text and f"text:{text}", sequence_length=length
    )
    model, objective, data, _ = hc.training.assemble(config)
    model.to(device)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-4), named_parameters=model.named_parameters()
    )
    torch.manual_seed(1 + hc.rank())
    for step, batch in zip(range(1, steps + 1), batches(data)):
        batch = batch.to(device)
        inputs, shared = model.prepare(*batch.inputs, **batch.shared)
        if step == 1 and hc.rank() == 0:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in shared.items())
            print(f"shared by {len(model)} blocks: {shapes}")
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            layers = model.to_layers()
            scores = hc.checkpoint_sequential(layers, segments, *inputs, use_reentrant=reentrant, **shared)
            loss = objective.loss(scores, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 10 == 0 or step == steps:
            mean = hc.allreduce(loss.detach(), name="loss")
            if hc.rank() == 0:
                print(f"step {step}: loss {mean:.4f}", flush=True)


def batches(data):
    """This rank's batches, epoch after epoch; the order of prediction changes with the epoch."""
    sampler = DistributedSampler(data, hc.size(), hc.rank())
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for chosen in BatchSampler(sampler, BATCH, drop_last=True):
            yield data.batch(chosen, [epoch] * BATCH)


if __name__ == "__main__":
    main()
