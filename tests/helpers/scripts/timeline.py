"""Trains with many buckets, tied layers and reentrant recomputation while Horovod writes its timeline; prints the steps."""

from __future__ import annotations

import torch
from torch import nn

import hvd_ckpt as hc

hc.init()
torch.manual_seed(3)
tied = nn.Linear(16, 16)
model = nn.Sequential(
    nn.Linear(16, 16), tied, nn.Tanh(), nn.Linear(16, 16), tied, nn.Tanh(), nn.Linear(16, 16), tied
)
optimizer = hc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    bucket_cap_mb=0.001,
)
steps = 5
for _ in range(steps):
    for _ in range(2):
        hc.checkpoint_sequential(model, 4, torch.randn(4, 16), use_reentrant=True).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if hc.rank() == 0:
    print(f"STEPS {steps} BUCKETS {len(optimizer.reduction_stats.last.launch_order)}", flush=True)
hc.barrier()
hc.shutdown()
