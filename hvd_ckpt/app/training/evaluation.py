"""Evaluation on samples that the model is not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.processes.grid import current
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.utils import run_warnings


def evaluate(
    model: nn.Module,
    data: Dataset,
    objective: Objective,
    average: AveragedWeights | None = None,
    *,
    batch: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    batches: int | None = None,
    parts: int = 1,
    in_step: bool = False,
) -> dict[str, float]:
    """Loss and metrics over the samples of ``data``, each seen by one rank; means over all their terms, the same on every rank.

    The model is in evaluation mode meanwhile, and batch norms use each rank's own running statistics. Collective, over all pipeline
    stages: the last one has the output, and tells the others. The bits depend on the parts of all ranks together, and not on which
    rank has which.

    Args:
        average: averaged weights of the model, evaluated as well, under names that begin with ``ema_``.
        batch: samples of a batch.
        autocast: returns the context of the forward pass.
        batches: the most batches that each part of the samples has; None for all samples.
        parts: number of parts of the samples that each rank evaluates, one after the other: its logical replicas, or 1.
        in_step: run the model equally often on every rank, since each of its forward passes communicates; a rank that has no
            samples left runs it on one without weight.

    Returns:
        ``{"loss": ..., ...}`` with the names of :meth:`Objective.metrics` and :meth:`Objective.of_loss`, and the number of samples.
    """
    all_parts, size = hvd.size() * parts, batch
    samples = len(data) if batches is None else min(len(data), batches * size * all_parts)
    longest = -(-samples // all_parts)  # samples of a part

    def run_part(part: int) -> tuple[float, dict[str, torch.Tensor]]:
        # Samples are dealt to the parts in turn, so that their numbers differ by one at most.
        numbers = range(part, samples, all_parts)
        sums: dict[str, torch.Tensor] = {}
        terms = 0.0
        for first in range(0, longest if in_step else len(numbers), size):
            # Without samples left, the first sample stands in: it is computed and not counted.
            indices = numbers[first : first + size] or range(1)
            drawn = data.batch(indices, [0] * len(indices)).to(device)
            with autocast():
                output = model(*drawn.inputs, **drawn.shared)
                # Only the last stage of a pipeline has the output.
                if output is None:
                    continue
                means = {"loss": objective.loss(output, drawn), **objective.metrics(output, drawn)}
            if first < len(numbers):
                weight = objective.weight(drawn)
                terms += weight
                for name, mean in means.items():
                    # A mean of no terms may be nan, and does not count.
                    term = mean.double() * weight if weight else torch.zeros((), dtype=torch.float64)
                    sums[name] = sums.get(name, 0.0) + term.to(mean.device)
        return terms, sums

    def run() -> dict[str, float]:
        first = hvd.rank() * parts
        means = _over_ranks([run_part(part) for part in range(first, first + parts)])
        means = current().gather_objects(means)[-1]  # of the last stage
        of_loss = objective.of_loss(means["loss"])
        return {**means, **{name: float(value) for name, value in of_loss.items()}}

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            means = run()
            if average is not None:
                with average.applied():
                    means.update({f"ema_{name}": mean for name, mean in run().items()})
    finally:
        model.train(training)
    return {**means, "samples": samples}


def _over_ranks(parts: list[tuple[float, dict[str, torch.Tensor]]]) -> dict[str, float]:
    """The means. A rank without samples does not know the names, so they are sent with the numbers."""
    of_rank = [(terms, {name: float(value) for name, value in sums.items()}) for terms, sums in parts]
    ranks = hvd.allgather_object(of_rank, name="hvd_ckpt.evaluation")
    everyone = [part for rank in ranks for part in rank]
    total = sum(count for count, _ in everyone)
    # A sum of floats in the order of the parts, whichever ranks have them: the same bits on every rank and any number of ranks.
    names = next((list(sums) for _, sums in everyone if sums), [])
    if names and not total:
        if hvd.rank() == 0:
            run_warnings.warn(
                "The loss and the metrics of an evaluation are nan: its samples have no target that counts. Evaluate more samples."
            )
        return dict.fromkeys(names, math.nan)
    return {name: sum(sums.get(name, 0.0) for _, sums in everyone) / total for name in names}
