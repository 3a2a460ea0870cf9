"""Steps and memory of models whose shards are in files."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc
from benchmarks.case import Case, Found, MeasuredJob
from benchmarks.suites.offload import offload
from hvd_ckpt.app.compare.runner.stats import alternating


def stepping(job: MeasuredJob, case: Case) -> Callable[[], Any]:
    """A step of a fresh model whose shards are where the case says."""
    layers, width, batch = (case.sizes[name] for name in ("layers", "width", "batch"))
    offload = None if case.engine == "none" else case.engine
    with hc.init_on_disk(job.folder):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
        model = nn.Sequential(*blocks)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()),
        named_parameters=model.named_parameters(),
        shard=hc.Shard("parameters", offload=offload, offload_folder=job.folder if offload else None),
        model=model,
    )
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measure(job: MeasuredJob) -> list[Found]:
    """The memory of the start and the first steps of each case, then seconds of steps in turn."""
    hc.init()
    steps: list[Callable[[], Any]] = []
    found: list[Found] = []

    def start(case: Case) -> None:
        steps.append(stepping(job, case))
        for _ in range(offload.warm_up):
            steps[-1]()

    for case in job.cases:
        memory = hc.measure_peak(lambda case=case: start(case))  # type: ignore[misc]
        found.append({"seconds": [], "peak_bytes": memory.peak_bytes, "held_bytes": memory.held_bytes})
    for _, number in alternating(range(len(steps)), job.steps):
        begun = time.perf_counter()
        steps[number]()
        found[number]["seconds"].append(time.perf_counter() - begun)
        job.tell("step", case=number)
    return found
