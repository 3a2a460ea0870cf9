"""Gradients in buckets on a device: control flags, weights under verification, and unusual gradients."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from alike_ranks import AlikeRanks
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum
from streams import DEVICE, Scenario, Simulation, check, own_stream
from torch import nn

from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.communicator import Communicator
from hvd_ckpt.reduction.reducer import Reducer

_number = itertools.count(1)


def train(
    simulation: Simulation, op: int = Average, compression: Any = Compression.none, dtype: Any = None
) -> None:
    """Steps on a stream of its own. A parameter is used for the first time in the third, and one is used twice in the fourth."""
    with AlikeRanks(simulation).running() as ranks:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(DEVICE, dtype)
        named = list(model.named_parameters())
        communicator = Communicator(ranks.process_set, op, 1.0, 1.0, compression)
        assignment = BucketAssignment(named, 1 << 13, None)
        reducer = Reducer(assignment, communicator, next(_number), False, True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        reducer.begin(optimizer)
        batch = torch.ones(8, 32, dtype=dtype, device=DEVICE)
        with own_stream():
            for step in range(6):
                output = model[:3](batch) if step < 2 else model(batch)
                if step == 3:
                    output = model[0](output)
                output.square().mean().backward()
                reducer.synchronize()
                optimizer.step()
                optimizer.zero_grad()


SCENARIOS: dict[str, Scenario] = {
    "average": train,
    "sum": functools.partial(train, op=Sum),
    "fp16 on the wire": functools.partial(train, compression=Compression.fp16),
    "bfloat16": functools.partial(train, dtype=torch.bfloat16),
}


def test_every_synchronization_is_needed() -> None:
    check(*SCENARIOS.values())
