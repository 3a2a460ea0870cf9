"""BERT on text, in a training loop of your own: a memory plan, micro-batches, an optimizer over all ranks.

    horovodrun -np 2 python examples/bert_pretrain.py --text FILE --budget 0.4x

15 % of the tokens, bytes here, are hidden and predicted (Devlin et al., "BERT", 2018).
"""

import click
import torch

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.sampler import Sampler
from hvd_ckpt.data.text import MaskedText
from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.models.bert import bert
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.text import show_bytes


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
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
    device = torch.device("cuda", hc.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    objective = NextOrHiddenToken()
    sizes = {"length": length, "width": width, "heads": 4, "layers": layers}
    try:
        data = MaskedText(Tokens(text), length)
        model = bert(vocabulary=data.tokens.vocabulary, **sizes).to(device)
        # Half a batch at a time: two micro-batches make a step.
        part = data.batch(range(batch - batch // 2), [0] * (batch - batch // 2)).to(device)
        autocast, loss = torch.bfloat16 if bf16 else None, lambda scores: objective.loss(scores, part)
        plan = hc.plan(model, *part.inputs, loss=loss, budget=budget, autocast=autocast)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    plan.apply(model)
    if hc.rank() == 0:
        before, after = show_bytes(plan.baseline.peak_bytes), show_bytes(plan.measured.peak_bytes)
        print(f"peak of a micro-batch: {after} recomputed, {before} kept")

    def loss_of(part):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return objective.loss(model(*part.inputs), part)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(1 + hc.rank())  # dropout of its own on each rank
    order = Sampler(len(data), seed=0)
    for step in range(steps):
        mine = order.part(step * batch * hc.size(), batch * hc.size(), hc.rank(), hc.size())
        optimizer.zero_grad()
        # Weighted by hidden tokens over all ranks and micro-batches, so that the mean is that of the whole batch.
        loss, _ = hc.accumulate(
            loss_of, data.batch(*mine).to(device), 2, weight=objective.weight, across_ranks=True
        )
        optimizer.step()
        if (step + 1) % 10 == 0 or step + 1 == steps:
            loss = hc.allreduce(loss, name="loss")
            if hc.rank() == 0:
                print(f"step {step + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
