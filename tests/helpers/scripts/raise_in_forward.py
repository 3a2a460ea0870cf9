"""Trains a small model; one rank's forward pass raises in the third step."""

from __future__ import annotations

import sys

import torch

import hvd_ckpt as hc


class Fragile(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and hc.rank() == hc.size() - 1:
            raise ValueError(f"planted on rank {hc.rank()}")
        return self.linear(x)


hc.init()
torch.manual_seed(0)
model = torch.nn.Sequential(Fragile(), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = hc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hc.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(10):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"rank {hc.rank()} finished step {step}", flush=True)
sys.exit("the planted error did not end the job")
