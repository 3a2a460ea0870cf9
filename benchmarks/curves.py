"""The loss of the same GPT on several numbers of ranks: with logical replicas, and with stock Horovod.

Both draw the same samples for each step, and divide them among however many ranks there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.case import Case
from hvd_ckpt.app.training.build import Assembly, assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.data.sampler import DistributedSampler

BATCH = 4  # samples of a replica
LEARNING_RATE = 2e-3
SEED = 3


def losses_of(case: Case) -> list[float]:
    """Trains on one rank; the mean loss of each step, over all samples. A rank of stock Horovod computes its part at once."""
    options = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
    parts = assemble(Config("gpt-tiny", model_options=options, sequence_length=32, seed=SEED))
    train = _stock if case.engine == "horovod" else _replicas
    return train(parts, case.sizes["replicas"], case.sizes["steps"])


def _replicas(parts: Assembly, replicas: int, steps: int) -> list[float]:
    hc.init()
    model, means = parts.model, list[float]()
    optimizer: Any = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        model=model,
        replicas=replicas,
    )
    for step in range(steps):
        losses = []
        for replica in optimizer.local_replicas():
            with replica:
                losses.append(_pass(parts, _samples(parts, step, replica.index, replicas, replicas)))
        optimizer.step()
        means.append(optimizer.replicas.mean(losses))
    return means


def _stock(parts: Assembly, replicas: int, steps: int) -> list[float]:
    import horovod.torch as hvd

    hvd.init()
    model, means = parts.model, list[float]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(SEED + hvd.rank())
    for step in range(steps):
        optimizer.zero_grad()
        loss = _pass(parts, _samples(parts, step, hvd.rank(), hvd.size(), replicas))
        optimizer.step()
        means.append(float(hvd.allreduce(loss)))
    return means


def _samples(parts: Assembly, step: int, number: int, of: int, replicas: int) -> Batch:
    """One of the parts of a step's samples."""
    count = BATCH * replicas
    batch: Batch = parts.train.batch(
        *DistributedSampler(parts.train, seed=SEED).part(step * count, count, number, of)
    )
    return batch


def _pass(parts: Assembly, batch: Batch) -> Tensor:
    loss = parts.objective.loss(parts.model(*batch.inputs, **batch.shared), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
