"""The ranks' part of ``hvd-ckpt bench tensor``: times steps of one GPT in parts by both ways, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.bench.harness.jobs import RankJob, join_torch, run_rank
from hvd_ckpt.bench.harness.stats import alternating
from hvd_ckpt.processes import parts

OURS, THEIRS = "hvd_ckpt", "PyTorch"
WARM_UP = 2  # steps


@dataclass(frozen=True)
class Job(RankJob):
    """One size of model. ``sizes``: arguments of the GPT; ``rounds``: in which each way takes ``steps`` steps."""

    worker = "hvd_ckpt.bench.tensor.job"

    sizes: dict[str, int]
    batch: int
    rounds: int
    steps: int


@dataclass
class RankResult:
    """Seconds of a step in each round, of each way; seconds of a step that sums take; elements of the parameters."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    sums: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    numel: dict[str, int] = field(default_factory=dict)


def _theirs(model: nn.Module) -> nn.Module:
    """The model by ``parallelize_module``, over a process group of PyTorch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (hc.tensor_size(),))
    plan: dict[str, Any] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.1": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, module in model.named_modules():
        if name.endswith(
            ".attention"
        ):  # of fused weights each part gets rows, which for the time of a step may be any
            plan |= {f"{name}.project": ColwiseParallel(), f"{name}.output": RowwiseParallel()}
            module.heads //= hc.tensor_size()
        if name.endswith(".perceptron"):
            plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def measure(job: Job) -> RankResult:
    """Times steps: forward and backward pass, and SGD."""
    hc.init(tensor=job.size)
    join_torch(job.folder, hc.tensor_rank(), job.size)
    result, ways = RankResult(), dict[str, Callable[[], float]]()
    for name, split in ((OURS, hc.tensor_parallel), (THEIRS, _theirs)):
        torch.manual_seed(0)
        model = split(gpt(**job.sizes, tied=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tokens = torch.randint(0, job.sizes["vocabulary"], (job.batch, job.sizes["length"] + 1))

        def step(model: Any = model, optimizer: Any = optimizer, tokens: Any = tokens) -> float:
            optimizer.zero_grad()
            scores = model(tokens[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(scores, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return float(loss)

        ways[name], result.seconds[name] = step, []
        result.losses[name] = step()
        for _ in range(WARM_UP - 1):
            step()
        result.numel[name] = sum(
            (one.to_local() if hasattr(one, "to_local") else one).numel() for one in model.parameters()
        )
    for _, name in alternating(list(ways), job.rounds):
        parts.add(torch.zeros(1))  # both begin together
        begin = time.perf_counter()
        for _ in range(job.steps):
            ways[name]()
        result.seconds[name].append((time.perf_counter() - begin) / job.steps)
    result.sums = _seconds_of_sums(ways[OURS], job)
    return result


def _seconds_of_sums(step: Callable[[], float], job: Job) -> list[float]:
    """Seconds of a step that sums and gathers take, waits for the other parts counted."""
    spent, exchange = [0.0], parts.exchange

    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        exchange(*arguments)
        spent[0] += time.perf_counter() - begin

    parts.exchange = timed
    try:
        found = []
        for _ in range(job.rounds):
            spent[0] = 0.0
            for _ in range(job.steps):
                step()
            found.append(spent[0] / job.steps)
        return found
    finally:
        parts.exchange = exchange


if __name__ == "__main__":
    run_rank(Job, measure)
