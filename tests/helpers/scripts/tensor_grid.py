"""A job with tensor parallelism: its grid, collectives among parts, and what is refused. Arguments: stages, tensor, case."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.collectives.agreement import of_all_processes, of_first_process
from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current

stages, tensor = int(sys.argv[1]), int(sys.argv[2])
case = sys.argv[3] if len(sys.argv) > 3 else "grid"
with pytest.raises(ValueError, match=r"tensor=5 does not divide the number of processes.*-np 5"):
    hc.init(tensor=5)
hc.init(stages=stages, tensor=tensor, stall_timeout=60)
grid = current()

if case == "grid":
    assert grid.number == (hc.grid().stage * hc.size() + hc.rank()) * tensor + hc.grid().part
    assert (hc.grid().tensor, hc.grid().stages, hc.size()) == (tensor, stages, grid.size // stages // tensor)
    assert of_all_processes(grid.number, "numbers") == list(range(grid.size))
    assert of_first_process(grid.number, "first") == 0
    # Horovod's world has the replicas of this stage and part, and no others.
    total = hc.allreduce(torch.tensor([float(grid.number)]), op=hc.Sum, name="numbers")
    assert total == sum(grid.process(hc.grid().stage, replica) for replica in range(hc.size()))
    assert grid.on_any_stage(grid.number % tensor == tensor - 1)
    torch.manual_seed(grid.number)
    for shape in ((3,), (5, 7), (1 << 20,)):
        own = torch.randn(shape)
        rows = parts.gather(own)
        assert torch.equal(rows[hc.grid().part], own)
        expected = rows[0]
        for row in rows[1:]:
            expected = expected + row
        before = own.clone()
        assert torch.equal(parts.add(own), expected)  # in the order of the parts
        assert torch.equal(own, before)
        assert torch.equal(parts.maximum(own), torch.stack(rows).amax(0))
    half = torch.randn(9).bfloat16()
    assert len({tuple(row.tolist()) for row in parts.gather(parts.add(half).float())}) == 1
    uneven = parts.gather(torch.full((hc.grid().part + 1,), 1.0), [(part + 1,) for part in range(tensor)])
    assert [len(row) for row in uneven] == list(range(1, tensor + 1))
    with pytest.raises(ValueError, match=f"tensor={tensor} already"):
        hc.init(tensor=tensor + 1)
    model = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="replicas=.* cannot be used with (tensor|stages)="):
        hc.DistributedOptimizer(optimizer, model.named_parameters(), replicas=4, model=model)
    for wire in ("int8", "int4", {"parameters": "int8"}):
        shard = hc.Shard("gradients", wire=wire)
        with pytest.raises(ValueError, match=f"tensor={tensor} cannot be used with wire="):
            hc.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard, model=model)
    with pytest.raises(ValueError, match="LocalSGD cannot be used with (tensor|stages)="):
        hc.LocalSGD(optimizer, model.named_parameters(), model=model)
    print("equal", flush=True)
else:
    if case == "dies":
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # by which a launcher ends the others, if it notices first
    parts.add(torch.ones(3))  # all have started, however long that takes
    if case == "stops":
        hc.init(stall_timeout=5)
    if grid.number == grid.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP) if case == "stops" else os._exit(3)
    parts.add(torch.ones(3))
