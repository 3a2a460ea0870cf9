"""The loss of the same GPT on several numbers of ranks: with logical replicas, and with stock Horovod.

Both draw the same samples for each step, and divide them among however many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.training.build import Assembly, assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.data.sampler import DistributedSampler

BATCH = 4  # samples of a replica
LEARNING_RATE = 2e-3
SEED = 3


@dataclass(frozen=True)
class CurveJob(RankJob):
    """One run of a GPT.

    Attributes:
        replicas: of the run, also with stock Horovod, where a rank computes its part of their samples at once.
        stock: train with stock Horovod.
        steps: to train.
    """

    worker = "same_bits.curves:measure"

    replicas: int
    stock: bool
    steps: int


def measure(job: CurveJob) -> list[float]:
    """Trains on one rank; the mean loss of each step, over all samples."""
    options = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
    parts = assemble(Config("gpt-tiny", model_options=options, sequence_length=32, seed=SEED))
    return (_stock if job.stock else _replicas)(job, parts)


def _replicas(job: CurveJob, parts: Assembly) -> list[float]:
    hc.init()
    model, means = parts.model, list[float]()
    optimizer: Any = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        model=model,
        replicas=job.replicas,
    )
    for step in range(job.steps):
        losses = []
        for replica in optimizer.local_replicas():
            with replica:
                losses.append(_pass(parts, _samples(parts, step, replica.index, job.replicas, job.replicas)))
        optimizer.step()
        means.append(optimizer.replicas.mean(losses))
    return means


def _stock(job: CurveJob, parts: Assembly) -> list[float]:
    import horovod.torch as hvd

    hvd.init()
    model, means = parts.model, list[float]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(SEED + hvd.rank())
    for step in range(job.steps):
        optimizer.zero_grad()
        loss = _pass(parts, _samples(parts, step, hvd.rank(), hvd.size(), job.replicas))
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
