"""Predictions by :mod:`hvd_ckpt.prediction`: layouts of clusters, steps of large jobs, and steps on hosts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.case import Case, Found, MeasuredJob, Row
from benchmarks.suites.clusters import CLUSTER
from benchmarks.suites.scale import split_of
from benchmarks.suites.scale_on_hosts import LOCAL, WAYS
from benchmarks.ways import OneLevel, efficiency, step_in
from benchmarks.workloads import workload
from hvd_ckpt.app.models.gpt import GPTBlock, gpt
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.prediction.computation import counted
from hvd_ckpt.prediction.layouts import Job as Layouts
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes, StepTime
from hvd_ckpt.prediction.training_layout import TrainingLayout
from hvd_ckpt.processes.runtime import allowed_cpus

PAYLOAD = 1448 / 1514  # of an Ethernet frame, without the headers of TCP, IP and Ethernet


def layout_of(job: MeasuredJob, case: Case) -> Found:
    """The fastest layout, and the fastest of those in which each rank is a replica."""
    shape = dict(case.sizes)
    batch, tflops, local, local_link, memory = (shape.pop(name) for name in (*CLUSTER, "memory"))
    network = Network(min(local, case.np), float(case.at["link"]) * 1e9 / 8, local_link * 1e9 / 8)
    layouts, ideal = layouts_of(tflops, tuple(shape.items()))
    # Computation depends on none of these, and is counted once.
    layouts = dataclasses.replace(
        layouts, ranks=case.np, batch=case.np * batch, network=network, memory=memory << 30
    )
    fit = [row for row in layouts.rows() if row.fits]
    if not fit:
        return {"seconds": [], "failure": "no layout fits"}
    best, alone = fit[0], next((row for row in fit if row.layout.replicas == case.np), None)
    return {
        "seconds": [best.seconds],
        "layout": str(best.layout),
        "limit": best.limit,
        "recomputing": best.recomputing,
        "efficiency": ideal * batch / best.seconds,
        "alone_layout": None if alone is None else str(alone.layout),
        "alone_efficiency": None if alone is None else ideal * batch / alone.seconds,
    }


@functools.cache
def layouts_of(tflops: float, shape: tuple[tuple[str, Any], ...]) -> tuple[Layouts, float]:
    """The layouts of a model, whose cluster is filled in, and seconds of a sample on a rank that only computes."""
    with torch.device("meta"):
        model = gpt(**dict(shape))

    def sample(samples: int) -> Sample:
        tokens = torch.zeros(samples, dict(shape)["length"], dtype=torch.long, device="meta")
        return Sample((tokens,), {}, None)

    once = counted(model, sample(1), tflops * 1e12)
    ideal = sum(block.choices[0].seconds for block in once.chain)
    return Layouts(model, 1, 0, 1, Network(), sample, tflops=tflops), ideal


def step_of(job: MeasuredJob, case: Case) -> Found:
    """A step; of local SGD the mean up to an average."""
    sizes = case.sizes
    gigabits = {f"{where}bandwidth": sizes[f"{where}link"] * 1e9 / 8 for where in ("", "local_")}
    times = {name: sizes[name] * 1e-6 for name in ("latency", "local_latency", "message")}
    kind = OneLevel if sizes["one_level"] else Network
    network = kind(sizes["local"], controller=case.controller, **gigabits, **times)
    shape = {name: sizes[name] for name in ("vocabulary", "length", "width", "heads", "layers")}
    model = sizes_of(sizes["tflops"], sizes["batch"], **shape)
    step = step_in(case.engine, model, split_of(case), network)
    steps = sizes["every"] if case.engine == "local" else 1
    return {
        "seconds": [step.seconds / steps],
        "efficiency": efficiency(step),
        "communicating": step.communicating / steps,
        "sent": step.sent / steps,
    }


@functools.cache
def sizes_of(tflops: float, batch: int, **shape: Any) -> ModelSizes:
    """The sizes of the model, each layer of which is recomputed; its blocks take as long as their operations."""
    length, width = shape["length"], shape["width"]
    tokens = batch * length
    with torch.device("meta"):
        model = gpt(**shape, checkpoint_interval=1)

    def operations(block: nn.Module) -> float:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        matrices = sum(module.weight.numel() for module in linear)
        # All pairs count, as in the formulas of Megatron-LM and PaLM by which rates are stated, although half would do if causal.
        attention = 2 * length * width if isinstance(block, GPTBlock) else 0
        return float(2 * tokens * (matrices + attention))

    forward = [operations(block) / (tflops * 1e12) for block in model]
    # The recomputation takes one forward pass, and the gradients of inputs and of weights another one each.
    backward = [3 * seconds for seconds in forward]
    return ModelSizes(model, forward, backward, activation=tokens * width * 4)


def step_on_hosts(row: Row, rows: Sequence[Row]) -> float | None:
    """Seconds of a step."""
    ranks, at = row.case.np, row.case.at
    alone = (other for other in rows if other.case == dataclasses.replace(row.case, np=1))
    one, local = next(alone, row), LOCAL[ranks]
    if one is row or one.over("forward") is None:
        return None
    # So many ranks share a processor. Between namespaces of one machine messages, too, cost what processors
    # need for them; across hosts that is what one TCP connection takes beside the time of a link.
    share = max(1.0, ranks / allowed_cpus())
    byte = 0.65e-9 * max(1.0, ranks / local / allowed_cpus())
    network = Network(
        local,
        bandwidth=1.0 / (8 / (PAYLOAD * float(at["link"]) * 1e6) + byte),
        local_bandwidth=1e9 / share,
        latency=100e-6 * share + float(at["delay"]) / 1e3,
        local_latency=50e-6 * share,
        message=20e-6 * share,
        controller="gloo",
    )
    with torch.device("meta"):
        model = workload(row.case.workload, row.case.sizes).model()
    forward, backward = (
        [share * one.over(name) / len(model)] * len(model) for name in ("forward", "backward")
    )
    sizes = ModelSizes(model, forward, backward)
    return sizes.step(StepTime(network, TrainingLayout(ranks, WAYS[row.case.engine]))).seconds
