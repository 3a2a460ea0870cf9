"""BERT on text, in a training loop of your own: a memory plan, micro-batches, an optimizer over all ranks.

    horovodrun -np 2 python examples/bert_pretrain.py --text FILE --budget 0.4x

15 % of the tokens, bytes here, are hidden and predicted (Devlin et al., "BERT", 2018).
"""

import click
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option("--steps", type=click.IntRange(1), default=100)
@click.option("--batch", type=click.IntRange(2), default=16, help="Samples of each rank in a step.")
@click.option("--length", type=click.IntRange(8), default=128, help="Tokens of a sample.")
@click.option("--width", type=click.IntRange(4), default=256, help="A multiple of the 4 heads.")
@click.option("--layers", type=click.IntRange(1), default=4)
@click.option("--budget", default="0.4x", help="Peak of a micro-batch's step: 0.4x, 2GiB, min.")
@click.option("--bf16", is_flag=True, help="Autocast to bfloat16.")
def main(text, steps, batch, length, width, layers, budget, bf16):
    hc.init()
    device = hc.local_device()
    sizes = {"width": width, "heads": 4, "layers": layers}
    config = hc.training.Config(
        "bert-mini", model_options=sizes, data=text and f"text:{text}", sequence_length=length
    )
    model, objective, data, _ = hc.training.assemble(config)  # or any model and loss of your own
    model.to(device)

    # Half a batch at a time: two micro-batches make a step.
    half = batch - batch // 2
    part = data.batch(range(half), [0] * half).to(device)
    autocast, loss = torch.bfloat16 if bf16 else None, lambda scores: objective.loss(scores, part)
    plan = hc.plan(model, *part.inputs, loss=loss, budget=budget, autocast=autocast)
    plan.apply(model)
    if hc.rank() == 0:
        before, after = (cost.peak_bytes / 2**20 for cost in (plan.baseline, plan.measured))
        print(f"peak of a micro-batch: {after:.1f} MiB recomputed, {before:.1f} MiB kept")

    def loss_of(part):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return objective.loss(model(*part.inputs), part)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(1 + hc.rank())  # different dropout on each rank
    for step, whole in zip(range(1, steps + 1), batches(data, batch)):
        optimizer.zero_grad()
        # Weighted by hidden tokens over all ranks and micro-batches, so that the mean is that of the whole batch.
        loss, _ = hc.accumulate(loss_of, whole.to(device), 2, weight=objective.weight, across_ranks=True)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            loss = hc.allreduce(loss, name="loss")
            if hc.rank() == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)


def batches(data, batch):
    """This rank's batches, epoch after epoch; what is hidden changes with the epoch."""
    sampler = DistributedSampler(data, hc.size(), hc.rank())
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for chosen in BatchSampler(sampler, batch, drop_last=True):
            yield data.batch(chosen, [epoch] * batch)


if __name__ == "__main__":
    main()
