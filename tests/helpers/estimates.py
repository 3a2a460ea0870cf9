"""What a step takes beside what ``estimate_memory`` says: ``horovodrun -np 4 --gloo python tests/helpers/estimates.py``.

Prints a row for each model and stage, with and without recomputation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import click
import torch
from random_text import RandomStep, random_step
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.planning.step import Sample, Step
from hvd_ckpt.utils.memory import bytes_alive, memory_of_tensors, memory_since, recording_peak

STEPS = 3


def measured_peak(make: Callable[[], nn.Module], sample: Any, loss: Any, **options: Any) -> int:
    """The most bytes at a time in a job's third step, all counted that is held; of the rank that needs most.

    The step alone is recorded: what Horovod's threads are the last to let go of is not seen to be freed, and would add up.

    Args:
        make: the model.
        sample, loss: as of ``estimate_memory``.
        options: of ``DistributedOptimizer``.
    """
    args = sample if isinstance(sample, tuple) else (sample,)
    before = memory_of_tensors()
    model = make()
    optimizer = distribute(
        torch.optim.AdamW(model.parameters()),
        named_parameters=model.named_parameters(),
        model=model,
        **options,
    )
    step = Step(model, Sample(args, {}, loss))

    def take() -> None:
        step.run()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS - 1):
        take()
    held = bytes_alive(memory_since(before))
    with recording_peak() as memory:
        take()
    return max(hc.allgather_object(held + memory.peak_bytes, name="peak"))


@click.command()
@click.option("--models", default="gpt-tiny,bert-tiny")
@click.option("--bucket-cap-mb", default=2.0)
@click.option("--width", default=256)
@click.option("--layers", default=4)
def main(models: str, bucket_cap_mb: float, width: int, layers: int) -> None:
    """Prints the table."""
    hc.init()

    def job(name: str, recompute: bool) -> RandomStep:
        options = {"width": width, "layers": layers, "heads": 4, "checkpoint_interval": int(recompute)}
        return random_step(name, 4, 64, 512, options)

    for name, recompute, stage in itertools.product(models.split(","), (False, True), range(4)):
        made, options = job(name, recompute), {"shard": stage, "bucket_cap_mb": bucket_cap_mb}
        estimate = hc.estimate_memory(made.model, hc.size(), sample=made.args, loss=made.loss, **options)
        make = functools.partial(lambda *of: job(*of).model, name, recompute)
        peak = measured_peak(make, made.args, made.loss, **options)
        if hc.rank() == 0:
            row = name, "yes" if recompute else "no", hc.size(), stage
            ratio = estimate.recorded_peak / peak
            click.echo(f"| {' | '.join(map(str, row))} | {peak / 2**20:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
