"""Trains on two ranks until rank 1 comes to grief; rank 0 has to be ended by the watchdog.

    horovodrun -np 2 --gloo python stalled.py {stops|alone|orphans} [FOLDER]

alone: rank 0 runs a model of stage 3 and rank 1 does not; a wait is announced after 1 s there. stops: rank 1 stops itself
(SIGSTOP) in mid-training. orphans: nothing goes wrong; each rank writes its process id to FOLDER and trains on until its
launcher is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvd_ckpt as hc
from hvd_ckpt import watchdog
from hvd_ckpt.watchdog import end_with_parent

CASE = sys.argv[1]
AT_STEP = 2

hc.init(stall_timeout=300)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = hc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    shard=3 if CASE == "alone" else 0,
    units=[model[0], model[1]] if CASE == "alone" else None,
)
if CASE == "orphans":
    assert end_with_parent()
    (Path(sys.argv[2]) / str(os.getpid())).touch()

for step in range(100_000):
    if CASE == "orphans":
        time.sleep(0.05)
    elif step == AT_STEP:
        hc.init(stall_timeout=5)
        if CASE == "alone":
            watchdog.NOTICE_SECONDS = 1.0
        if hc.rank() == 1:
            print("rank 1 comes to grief", flush=True)
            if CASE == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
