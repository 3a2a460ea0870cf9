"""A script of one's own that fails: on all ranks alike but for the last one, which fails otherwise; or on the last one alone."""

from __future__ import annotations

import atexit
import sys
import time

import torch

import hvd_ckpt as hc

case = sys.argv[1]
if case == "hook":
    sys.excepthook = lambda kind, error, trace: print(f"own hook: {error}", file=sys.stderr)
hc.init()
hc.barrier()
last = hc.rank() == hc.size() - 1
if case != "alone":
    atexit.register(time.sleep, 3)  # the launcher ends the others when a rank ends
    hc.barrier()
    if last and case == "differ":
        raise KeyError("planted on the last rank")
    raise ValueError("planted on ranks")
if last:
    raise ValueError("planted on the last rank")
while True:
    hc.allreduce(torch.ones(1), name="one")
