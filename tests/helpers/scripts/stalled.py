"""Trains on two ranks until rank 1 comes to grief; rank 0 has to be ended by the watchdog.

    horovodrun -np 2 --gloo python stalled.py {stops|alone|unit|gone|orphans} [FOLDER]

alone: rank 0 runs a model of stage 3 and rank 1 does not; the wait is announced after half of the limit. gone: rank 1 ends there.
unit: rank 1 leaves out a unit of the model that rank 0 uses. stops: rank 1 stops itself (SIGSTOP) in mid-training.
orphans: nothing goes wrong; each rank writes its process id to FOLDER and trains on until its launcher is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvd_ckpt as hc
from hvd_ckpt.processes.ancestry import end_with_parent

CASE = sys.argv[1]
# A unit that ranks have used together is gathered ahead, whether it is used or not.
AT_STEP = 0 if CASE == "unit" else 2
SHARDED = CASE in ("alone", "unit", "gone")

hc.init(stall_timeout=300)
torch.manual_seed(0)  # other weights on each rank would be an error of their own
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
optimizer = hc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    shard=hc.Shard(3, units=list(model)) if SHARDED else 0,
    model=model,
)
if CASE == "orphans":
    assert end_with_parent()
    (Path(sys.argv[2]) / str(os.getpid())).touch()

for step in range(100_000):
    if CASE == "orphans":
        time.sleep(0.05)
    elif step == AT_STEP:
        hc.init(stall_timeout=30 if CASE == "unit" else 5)
        if hc.rank() == 1:
            print("rank 1 comes to grief", flush=True)
            if CASE == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if CASE == "gone":
                break
            if CASE == "unit":
                model.forward = model[:2].forward
            else:
                time.sleep(600)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
