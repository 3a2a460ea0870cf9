"""Trains a model with recomputation, a tied layer and dropout; prints a hash of the weights per run.

    horovodrun -np 4 --gloo python hard_graph.py {hvd_ckpt|horovod} VARIANT [VARIANT ...]

Each run is trained with one VARIANT: none, reentrant or nonreentrant. Stock Horovod can only reduce the last.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import horovod.torch as horovod
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import hvd_ckpt as hc

STEPS = 6


class HardGraph(nn.Module):
    """Small layers of many sizes, one of them used three times, dropout in all."""

    def __init__(self, library: str, variant: str) -> None:
        super().__init__()
        self.library, self.variant = library, variant
        self.tied = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(64, 48 + 8 * (i % 5)),
                    nn.Dropout(0.2),
                    nn.Tanh(),
                    nn.Linear(48 + 8 * (i % 5), 64),
                )
                for i in range(12)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = [*self.layers[:4], self.tied, *self.layers[4:8], self.tied, *self.layers[8:], self.tied]
        if self.variant == "none":
            for function in functions:
                x = function(x)
            return x
        if self.library == "hvd_ckpt":
            return hc.checkpoint_sequential(functions, 4, x, use_reentrant=self.variant == "reentrant")
        return torch_checkpoint.checkpoint_sequential(
            functions, 4, x, use_reentrant=self.variant == "reentrant"
        )


def run(library: str, variant: str) -> str:
    """A hash of the weights after some steps."""
    hvd: Any = hc if library == "hvd_ckpt" else horovod
    torch.manual_seed(11)
    model = HardGraph(library, variant)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        named_parameters=model.named_parameters(),
        **({"bucket_cap_mb": 0.05} if library == "hvd_ckpt" else {}),
    )
    torch.manual_seed(100 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(16, 64)) - 1).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def main(library: str, variants: list[str]) -> None:
    if library == "hvd_ckpt":
        hc.init()
    else:
        horovod.init()
        torch.set_num_threads(1)
    hashes = [run(library, variant) for variant in variants]
    gathered = horovod.allgather_object(hashes)
    if horovod.rank() == 0:
        print(f"RANKS-EQUAL {all(other == hashes for other in gathered)}", flush=True)
        print(" ".join(["HASHES", *hashes]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
