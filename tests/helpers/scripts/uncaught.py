"""A script that fails on all ranks alike; in the case "differ" the last one fails otherwise."""

from __future__ import annotations

import atexit
import os
import sys
import time

import hvd_ckpt as hc

case = sys.argv[1]
if case == "hook":
    sys.excepthook = lambda kind, error, trace: print(f"own hook: {error}", file=sys.stderr)
if case == "differ" and os.environ["HOROVOD_RANK"] == "2":
    # As with the backport of exception groups on Python 3.10.
    sys.excepthook = lambda *error: sys.__excepthook__(*error)
    sys.excepthook.__module__ = "exceptiongroup._formatting"
hc.init()
hc.barrier()
atexit.register(time.sleep, 3)  # the launcher ends the others when a rank ends
if case == "differ" and hc.rank() == hc.size() - 1:
    raise KeyError("planted on the last rank")
raise ValueError("planted on ranks")
