"""Measurements of speed and memory, beside other engines: ``python -m benchmarks SUITE --help``, in a clone of the repository.

A suite is a file in ``suites``, with a :class:`benchmarks.suite.Suite` of its name; an engine is one in ``engines``, or any class
of :mod:`hvd_ckpt.app.compare.runner.engines`. ``case`` has cases and rows, ``worker`` is what each rank runs (some suites have
their own), and ``probes`` are what it measures beside seconds. Below them is :mod:`hvd_ckpt.app.compare.runner`: jobs, reports,
options.

    reduce            speed of gradient reduction beside stock Horovod and DDP
    recompute         plans beside other ways to recompute
    shard             memory and time of sharding
    pipeline          pipeline stages beside torch.distributed.pipelining
    tensor            layers in parts beside PyTorch's parallelize_module
    local             local SGD and DiLoCo beside synchronous training
    train             overhead of the training loop
    snapshots         how long training pauses for a snapshot (by tests/faults)
    replicas          hashes of runs on several numbers of ranks (by tests/same_bits)
    scale             steps on up to 16,384 ranks, predicted from sizes by the formulas of hvd_ckpt.prediction
    scale_on_hosts    such predictions, beside steps on hosts with slow links
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"

sys.path.append(str(TESTS))  # at the end, so that no module there hides an installed one
