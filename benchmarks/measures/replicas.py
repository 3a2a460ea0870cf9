"""Losses of a GPT that is trained as logical replicas or with stock Horovod."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.case import Case, Found, MeasuredJob
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.data.sampler import DistributedSampler

BATCH = 4  # samples of a replica
LEARNING_RATE = 2e-3
SEED = 3


def measure(job: MeasuredJob, case: Case) -> Found:
    """Trains on one rank; the mean loss of each step, over all samples. A rank of stock Horovod computes its part at once."""
    import horovod.torch as hvd

    options = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
    parts = assemble(Config("gpt-tiny", model_options=options, sequence_length=32, seed=SEED))
    model, replicas, sampler = parts.model, case.sizes["replicas"], DistributedSampler(parts.train, seed=SEED)
    stock, count = case.engine == "horovod", BATCH * replicas
    library: Any = hvd if stock else hc
    library.init()
    optimizer = library.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        **({} if stock else {"model": model, "replicas": replicas}),
    )
    library.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(SEED + hvd.rank())

    def run(step: int, number: int, of: int) -> Tensor:
        """The forward and backward pass of one of the parts of a step's samples; its loss."""
        batch = parts.train.batch(*sampler.part(step * count, count, number, of))
        loss = parts.objective.loss(model(*batch.inputs, **batch.shared), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    means = []
    for step in range(case.sizes["steps"]):
        optimizer.zero_grad()
        losses = [run(step, hvd.rank(), hvd.size())] if stock else []
        for replica in () if stock else optimizer.local_replicas():
            with replica:
                losses.append(run(step, replica.index, replicas))
        optimizer.step()
        means.append(float(hvd.allreduce(losses[0]) if stock else optimizer.replicas.mean(losses)))
    return {"losses": means}
