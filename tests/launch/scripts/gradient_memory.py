"""Prints the peak bytes of training steps, with gradients as the largest part: run under horovodrun or alone.

horovodrun -np 2 --gloo python gradient_memory.py {hvd_ckpt|horovod|one_process}
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.memory import measure_peak

LIBRARY = sys.argv[1]
WIDTH, LAYERS, CAP_MB = 512, 16, 4.0

if LIBRARY == "horovod":
    import horovod.torch as hvd

    hvd.init()
else:
    hc.init()

model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
bare = torch.optim.SGD(model.parameters(), lr=0.01)
if LIBRARY == "hvd_ckpt":
    optimizer = hc.DistributedOptimizer(bare, named_parameters=model.named_parameters(), bucket_cap_mb=CAP_MB)
elif LIBRARY == "horovod":
    optimizer = hvd.DistributedOptimizer(bare, named_parameters=model.named_parameters())
else:
    optimizer = bare


def step() -> None:
    if LIBRARY == "horovod":
        optimizer.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=True)
    model(torch.ones(2, WIDTH)).mean().backward()
    optimizer.step()


first = measure_peak(step).peak_bytes
optimizer.zero_grad()
later = [measure_peak(step).peak_bytes for _ in range(3)]
gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
if LIBRARY == "one_process" or hc.rank() == 0:
    peaks = " ".join(map(str, later))
    print(f"GRADIENTS {gradients} FIRST {first} LATER {peaks} BUCKET {int(CAP_MB * 2**20)}", flush=True)
