"""Evaluation on samples that the model is not trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import horovod.torch as hvd
import torch

from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils import run_warnings

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


def evaluate(run: Trainer) -> dict[str, float]:
    """Loss and metrics over the validation split, each sample seen by one rank; means over all their terms, the same on every rank.

    The model is in evaluation mode meanwhile, and batch norms use each rank's own running statistics. Collective, over all pipeline
    stages: the last one has the output, and tells the others. The bits depend on the parts of all ranks together, and not on which
    rank has which. Averaged weights are evaluated as well, under names that begin with ``ema_``.

    If its forward passes communicate, the model runs equally often on every rank: a rank that has no samples left runs it on one
    without weight.

    Returns:
        ``{"loss": ..., ...}`` with the names of :meth:`Objective.metrics` and :meth:`Objective.of_loss`, and the number of samples.
    """
    model, data, objective, average = run.model, run.test, run.objective, run.average
    assert data is not None
    size, batches, parts = run.config.micro_batch, run.config.eval_batches, run.mode.parts
    all_parts = hvd.size() * parts
    samples = len(data) if batches is None else min(len(data), batches * size * all_parts)
    longest = -(-samples // all_parts)  # samples of a part

    def run_part(part: int) -> tuple[float, dict[str, torch.Tensor]]:
        # Samples are dealt to the parts in turn, so that their numbers differ by one at most.
        numbers = range(part, samples, all_parts)
        sums: dict[str, torch.Tensor] = {}
        terms = 0.0
        for first in range(0, longest if run.config.shard.stage == 3 else len(numbers), size):
            # Without samples left, the first sample stands in: it is computed and not counted.
            indices = numbers[first : first + size] or range(1)
            drawn = data.batch(indices, [0] * len(indices)).to(run.device)
            with run.precision.autocast():
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

    def means_of_all() -> dict[str, float]:
        first = hvd.rank() * parts
        means = _over_ranks([run_part(part) for part in range(first, first + parts)])
        means = current().gather_objects(means)[-1]  # of the last stage
        of_loss = objective.of_loss(means["loss"])
        return {**means, **{name: float(value) for name, value in of_loss.items()}}

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            means = means_of_all()
            if average is not None:
                with average.applied():
                    means.update({f"ema_{name}": mean for name, mean in means_of_all().items()})
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
