"""A GPT whose layers are split over two processes, on 2 replicas of 2 parts each:

    horovodrun -np 4 python examples/tensor_gpt.py

Every part trains on the batch of its replica; sums among the parts make the layers whole. The model is this file's own,
and the recipe says how its layers are split. It learns to repeat the token of three places before.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc

LENGTH, VOCABULARY, BACK = 16, 30, 3
RECIPE = {
    "tokens": "vocabulary",
    "*.attention": "heads",
    "*.attention.query": "column",
    "*.attention.key": "column",
    "*.attention.value": "column",
    "*.attention.output": "row",
    "*.perceptron.0": "column",
    "*.perceptron.2": "row",
    "scores": "vocabulary",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # However many heads this part has, their width is the same.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        result: Tensor = x + self.dropout(self.perceptron(self.perceptron_norm(x)))
        return result


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = hc.checkpoint(block, x, partition=True)
        result: Tensor = self.scores(self.norm(x))
        return result


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
    model = GPT(width=64, heads=4, layers=2, dropout=0.05)
    whole = sum(parameter.numel() for parameter in model.parameters())
    model = hc.tensor_parallel(model, RECIPE)
    own = sum(parameter.numel() for parameter in model.parameters())
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
    )
    torch.manual_seed(1 + hc.rank())
    first = hc.rank() == hc.grid().part == 0
    if first:
        print(f"{hc.size()} replicas of {hc.grid().tensor} parts; a part has {own} of {whole} parameters")
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
