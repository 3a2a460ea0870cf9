"""Time and memory of offloaded steps: ``python -m benchmarks.offload --folder /scratch``.

First of the optimizer state by itself, then of a model whose parameters are split, with each value of ``offload``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.utils.memory import measure_peak

MIB = 1 << 20
LAYERS, WIDTH, BATCH = 16, 2048, 256


def make() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(8 * MIB)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn(8 * MIB)
    return torch.optim.AdamW(weights)


def show_times(steps: dict[str, Callable[[], Any]]) -> None:
    """Prints medians of seconds and processor seconds of steps taken in turn: A B B A."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name in [*steps, *reversed(steps)] * 3:
        start = time.perf_counter(), time.process_time()
        steps[name]()
        seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for name, pairs in seconds.items():
        wall, processor = (statistics.median(column) for column in zip(*pairs))
        click.echo(f"{name}: a step takes {wall:.2f} s, {processor:.3f} s of a processor")


def model_step(folder: Path, offload: str | None) -> Callable[[], Any]:
    with hc.init_on_disk(folder):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        model = nn.Sequential(*blocks)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()),
        named_parameters=model.named_parameters(),
        shard=hc.Shard("parameters", offload=offload, offload_folder=folder if offload else None),
        model=model,
    )
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plain, offloaded, offload = make(), make(), Offload(folder, torch.device("cpu"))
    steps: dict[str, Callable[[], Any]] = {"without": plain.step, "with": lambda: offload.step(offloaded, offloaded.step)}
    process = psutil.Process()
    for name in ("with", "without"):
        before = process.memory_info().rss
        steps[name]()
        click.echo(f"{name} offload adds {(process.memory_info().rss - before) / MIB:.1f} MiB")
    show_times(steps)
    click.echo(f"offloaded: {offload.bytes / MIB:.1f} MiB")
    hc.init()
    click.echo(f"{LAYERS} blocks, {LAYERS * WIDTH * WIDTH * 4 / MIB:.0f} MiB of parameters, batch {BATCH}")
    models: dict[str, Callable[[], Any]] = {}
    for what in (None, "optimizer", "parameters"):

        def start(what: str | None = what) -> None:
            step = models[f"offload={what!r}"] = model_step(folder, what)
            for _ in range(2):
                step()

        memory = measure_peak(start)
        peak, held = memory.peak_bytes / MIB, memory.held_bytes / MIB
        click.echo(f"offload={what!r}: at most {peak:.0f} MiB allocated, {held:.0f} MiB of them after a step")
    show_times(models)


if __name__ == "__main__":
    main()
