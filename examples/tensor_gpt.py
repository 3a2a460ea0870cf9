"""A GPT whose layers are split over two processes, on 2 replicas of 2 parts each:

    horovodrun -np 4 python examples/tensor_gpt.py

Every part trains on the batch of its replica; sums among the parts make the layers whole. The model learns to repeat its input's
token of three places before.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt

LENGTH, VOCABULARY, BACK = 16, 30, 3


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same on all parts of a replica."""
    generator = torch.Generator().manual_seed(1000 * step + hc.rank())
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return tokens, tokens.roll(BACK, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tensor", type=int, default=2, help="parts of each layer; must divide the processes"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()

    hc.init(tensor=options.tensor)
    torch.manual_seed(0)
    model = gpt(vocabulary=VOCABULARY, length=LENGTH, width=64, heads=4, layers=2, dropout=0.05)
    whole = sum(parameter.numel() for parameter in model.parameters())
    model = hc.tensor_parallel(model)
    own = sum(parameter.numel() for parameter in model.parameters())
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
    )
    torch.manual_seed(1 + hc.rank())
    first = hc.rank() == hc.tensor_rank() == 0
    if first:
        print(f"{hc.size()} replicas of {hc.tensor_size()} parts; a part has {own} of {whole} parameters")
    for step in range(options.steps):
        tokens, targets = batch_of(step, options.batch)
        optimizer.zero_grad()
        # The rows without a target: nothing can tell what was three places before the first ones.
        targets[:, :BACK] = -100
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        hc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if first and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
