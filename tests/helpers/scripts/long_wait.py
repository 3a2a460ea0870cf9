"""Says how often a rank sleeps while it waits for a collective that the other one begins a second later."""

import os
import resource
import sys
import time

import torch

import hvd_ckpt as hc
from hvd_ckpt.collectives import asynchronous

hc.init()
tensor = torch.ones(2)
hc.allreduce(tensor, name="sum")  # both ranks are ready
if hc.rank() == 0:
    time.sleep(1)
before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
if sys.argv[1] == "synchronous":
    hc.allreduce(tensor, name="sum")
else:
    asynchronous.wait(hc.allreduce_async(tensor, name="sum"))
if hc.rank() == 1:
    print(f"sleeps: {resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before}", flush=True)
hc.shutdown()
os._exit(0)
