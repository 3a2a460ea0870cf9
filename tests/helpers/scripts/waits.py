"""Waits for other ranks. In the case ``cycle`` for collectives within what would be one cycle, of names that Horovod knows and of
new ones. In the others, ``synchronous`` and ``asynchronous``, says how often a rank sleeps in a wait of a second."""

import os
import resource
import sys
import time

import torch

import hvd_ckpt as hc
from hvd_ckpt.collectives import asynchronous


def sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


hc.init()
tensor = torch.full((2,), float(hc.rank()))
if sys.argv[1] == "cycle":
    for step in range(3):
        for name in ("known", f"new {step}"):
            assert hc.allreduce(tensor, name=name).tolist() == [(hc.size() - 1) / 2] * 2
    print(f"rank {hc.rank()} has all", flush=True)
    os._exit(0)  # Horovod ends with a cycle
hc.allreduce(tensor, name="sum")  # both ranks are ready
if hc.rank() == 0:
    time.sleep(1)
before = sleeps()
if sys.argv[1] == "synchronous":
    hc.allreduce(tensor, name="sum")
else:
    asynchronous.wait(hc.allreduce_async(tensor, name="sum"))
if hc.rank() == 1:
    print(f"sleeps: {sleeps() - before}", flush=True)
hc.shutdown()
os._exit(0)
