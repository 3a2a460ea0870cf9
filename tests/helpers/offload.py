"""Time and memory of steps with offloaded optimizer state: ``python tests/helpers/offload.py --folder /scratch``."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import psutil
import torch

from hvd_ckpt.sharding.offload import OptimizerOffload

MIB = 1 << 20


def make() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(8 * MIB)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn(8 * MIB)
    return torch.optim.AdamW(weights)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
def main(folder: Path) -> None:
    """Prints what the state adds to resident memory, and medians of seconds and processor seconds of a step."""
    torch.set_num_threads(1)
    plain, offloaded, offload = make(), make(), OptimizerOffload(folder, torch.device("cpu"))
    steps = {"without": plain.step, "with": lambda: offload.step(offloaded, offloaded.step)}
    process = psutil.Process()
    for name in ("with", "without"):
        before = process.memory_info().rss
        steps[name]()
        click.echo(f"{name} offload adds {(process.memory_info().rss - before) / MIB:.1f} MiB")
    seconds: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for name in ("without", "with", "with", "without") * 3:
        start = time.perf_counter(), time.process_time()
        steps[name]()
        seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for name, pairs in seconds.items():
        wall, processor = (statistics.median(column) for column in zip(*pairs))
        click.echo(f"{name} offload a step takes {wall:.2f} s, {processor:.3f} s of a processor")
    click.echo(f"offloaded: {offload.bytes / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
