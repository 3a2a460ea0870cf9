"""Evaluation on samples that the model is not trained on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.processes.grid import current
from hvd_ckpt.sharding.averaging import AveragedWeights


def evaluate(
    model: nn.Module,
    data: Dataset,
    objective: Objective,
    *,
    batch: int,
    batches: int | None = None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    in_step: bool = False,
    average: AveragedWeights | None = None,
    parts: int = 1,
) -> dict[str, float]:
    """Loss and metrics over the samples of ``data``, each seen by one rank; means over all their terms, the same on every rank.

    The model is in evaluation mode meanwhile, and batch norms use each rank's own running statistics. Collective, over all pipeline
    stages: the last one has the output, and tells the others. The bits depend on the parts of all ranks together, and not on which
    rank has which.

    Args:
        batch: samples of a batch.
        batches: the most batches that each part of the samples has; None for all samples.
        autocast: returns the context of the forward pass.
        in_step: run the model equally often on every rank, since each of its forward passes communicates; a rank that has no
            samples left runs it on one without weight.
        average: averaged weights of the model, evaluated as well, under names that begin with ``ema_``.
        parts: of the samples that each rank evaluates, one after the other: its logical replicas, or 1.

    Returns:
        ``{"loss": ..., ...}`` with the names of :meth:`Objective.metrics` and :meth:`Objective.of_loss`, and the number of samples.
    """
    all_parts = hvd.size() * parts
    samples = len(data) if batches is None else min(len(data), batches * batch * all_parts)
    most = -(-samples // all_parts)  # of one part

    def run_part(part: int) -> tuple[float, dict[str, torch.Tensor]]:
        own = range(part, samples, all_parts)
        sums: dict[str, torch.Tensor] = {}
        terms = 0.0
        for first in range(0, most if in_step else len(own), batch):
            indices = own[first : first + batch] or range(1)
            one = data.batch(indices, [0] * len(indices)).to(device)
            with autocast():
                output = model(*one.inputs, **one.shared)
                if output is None:  # but on the last stage of a pipeline
                    continue
                means = {"loss": objective.loss(output, one), **objective.metrics(output, one)}
            if first < len(own):
                weight = objective.weight(one)
                terms += weight
                for name, mean in means.items():
                    sums[name] = sums.get(name, 0.0) + mean.double() * weight
        return terms, sums

    def run() -> dict[str, float]:
        found = _over_ranks([run_part(hvd.rank() * parts + part) for part in range(parts)])
        if current().stages > 1:
            found = current().gather_objects(found)[-1]
        of_loss = objective.of_loss(found["loss"])
        return {**found, **{name: float(value) for name, value in of_loss.items()}}

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
    own = [(terms, {name: float(value) for name, value in sums.items()}) for terms, sums in parts]
    ranks = hvd.allgather_object(own, name="hvd_ckpt.evaluation")
    everyone = [part for rank in ranks for part in rank]
    total = sum(count for count, _ in everyone)
    names = next((list(found) for _, found in everyone if found), [])
    return {name: sum(found.get(name, 0.0) for _, found in everyone) / total for name in names}
