"""Prints the peak bytes of training steps, with gradients as the largest part: run under horovodrun or alone.

horovodrun -np 2 --gloo python gradient_memory.py {hvd_ckpt|horovod|one_process} ...
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.memory import measure_peak

WIDTH, LAYERS, CAP_MB = 512, 16, 4.0


def report(library: str) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if library == "hvd_ckpt":
        optimizer = hc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), bucket_cap_mb=CAP_MB
        )
    elif library == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        if library == "horovod":
            optimizer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, WIDTH)).mean().backward()
        optimizer.step()

    first = measure_peak(step).peak_bytes
    optimizer.zero_grad()
    later = [measure_peak(step).peak_bytes for _ in range(3)]
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    if hvd.rank() == 0:
        peaks = " ".join(map(str, later))
        print(
            f"{library} GRADIENTS {gradients} FIRST {first} LATER {peaks} BUCKET {int(CAP_MB * 2**20)}",
            flush=True,
        )


(hvd if "horovod" in sys.argv[1:] else hc).init()
for name in sys.argv[1:]:
    report(name)
