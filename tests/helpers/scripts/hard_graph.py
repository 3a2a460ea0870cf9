"""Trains a model with recomputation, a tied layer and dropout; prints a hash of the weights per run.

horovodrun -np 4 --gloo python hard_graph.py RUNS
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.compare.training import fingerprint

STEPS = 6


class HardGraph(nn.Module):
    """Small layers of many sizes, one of them used three times, dropout in all."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(64, 64)
        widths = [48 + 8 * (i % 5) for i in range(12)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 64))
            for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = [*self.layers[:4], self.tied, *self.layers[4:8], self.tied, *self.layers[8:], self.tied]
        return hc.checkpoint_sequential(functions, 4, x, use_reentrant=True)


def run() -> tuple[str, int]:
    """A hash of the weights after some steps, and the number of buckets."""
    torch.manual_seed(11)
    model = HardGraph()
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), bucket_cap_mb=0.05
    )
    torch.manual_seed(100 + hc.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(16, 64)) - 1).square().mean().backward()
        optimizer.step()
    return fingerprint(model.named_parameters())[:16], len(optimizer.reduction_stats.last.launch_order)


if __name__ == "__main__":
    hc.init()
    results = [run() for _ in range(int(sys.argv[1]))]
    assert hc.allgather_object(results) == [results] * hc.size(), "ranks differ"
    if hc.rank() == 0:
        print("BUCKETS", sum(buckets for _, buckets in results), flush=True)
        print("HASHES", *[hash for hash, _ in results], flush=True)
    hc.barrier()
    hc.shutdown()
