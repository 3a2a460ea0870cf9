"""The passes of a step: of this rank's part of the global batch, in micro-batches or in pipeline stages, or of its replicas.

A global batch has one part for each rank, or for each logical replica. Where there are replicas, each is computed in its own random
state and with its own buffers, and the losses of all are weighed together before the first backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.local import begin_mean_terms
from hvd_ckpt.batchnorm import commit_batch_norm
from hvd_ckpt.data.objectives import Batch, Objective
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.distributed.precision import Precision
from hvd_ckpt.pipeline.microbatch import Accumulated, accumulate
from hvd_ckpt.pipeline.pipeline import Pipeline
from hvd_ckpt.sharding.clipping import clip_grad_norm_

Parts = Sequence[tuple[Batch, int]]
"""Batches, and the samples of each: 0 if it has no weight, and is only there so that its owner takes part."""


def parts_of_rank(config: Config) -> int:
    """The number of parts of a global batch that each rank computes."""
    ranks: int = hvd.size()
    return (config.replicas or ranks) // ranks


class Passes:
    """Runs the passes of one step after the other.

    Args:
        model: with its plan, in pipeline stages if configured.
        optimizer: the ``DistributedOptimizer``.
        objective: the loss.
        device: of the batches.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: Any,
        objective: Objective,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._objective, self._precision, self._device = objective, precision, device
        self._buffers: Any = None  # before the step, where it may be skipped
        self.idle = False  # with local SGD: no rank of this rank's group has had any terms in the last step

    def run(self, parts: Parts, micro_batches: int) -> list[Accumulated]:
        """The gradients of this rank's parts; returns loss and terms of each."""
        # With local SGD a run goes on to the next entry of the log, where all ranks hear that it must stop.
        skips = self._config.on_nan == "skip" or (self._config.is_local and self._config.on_nan == "stop")
        if self._config.replicas is not None:
            self._buffers = self._optimizer.replicas.buffers() if skips else None
            return self._of_replicas(parts, micro_batches)
        self._buffers = [buffer.clone() for buffer in self._model.buffers()] if skips else None
        ((batch, samples),) = parts
        if self._config.is_local:
            return [self._in_group(batch.to(self._device), samples, micro_batches)]
        run = self._in_stages if isinstance(self._model, Pipeline) else self._in_turn
        return [run(batch.to(self._device), samples, micro_batches)]

    def finish(self, parts: Parts, skipped: bool) -> None:
        """Updates the statistics of deferred batch norms after the reduction, or takes back what the passes have changed."""
        kind = self._config.batch_norm
        if kind.startswith("deferred") and self._config.replicas is None:
            discard = skipped or not parts[0][1]
            commit_batch_norm(self._model, across_ranks=kind == "deferred-ranks", discard=discard)
        if skipped and self._config.replicas is not None:
            self._optimizer.replicas.restore_buffers(self._buffers)
        elif skipped:
            with torch.no_grad():
                for buffer, kept in zip(self._model.buffers(), self._buffers):
                    buffer.copy_(kept)

    def step(self, accumulated: Sequence[Accumulated], skipped: bool) -> None:
        """The optimizer's step. With local SGD a rank without gradients, or that skips them, takes part in averages all the same.

        Args:
            accumulated: what :meth:`run` has returned; its terms are what this rank counts for in the next average.
            skipped: with local SGD only.
        """
        if skipped or self.idle:
            with self._optimizer.without_reduction():
                return
        if self._config.is_local and self._precision.scaler is None:  # which may skip a step that was weighed
            self._optimizer.weigh(accumulated[0].weight)
        self._precision.step(self._optimizer)

    def clip(self, norm: float) -> None:
        """Clips the reduced gradients."""
        self._precision.unscale(self._optimizer)
        if isinstance(self._model, Pipeline):
            self._model.clip_grad_norm_(norm)
        else:
            clip_grad_norm_(self._model.parameters(), norm)

    def _in_turn(self, batch: Batch, samples: int, micro_batches: int, mean_terms: Any = None) -> Accumulated:
        return accumulate(
            self._loss,
            batch,
            micro_batches,
            checkpoint=self._config.checkpoint,
            weight=self._objective.weight if samples else _nothing,
            across_ranks=True,
            mean_terms=mean_terms,
            backward=self._backward,
        )

    def _in_group(self, batch: Batch, samples: int, micro_batches: int) -> Accumulated:
        own = self._objective.weight(batch) if samples else 0.0
        mean_terms = begin_mean_terms(self._optimizer, float(own))
        accumulated = self._in_turn(batch, samples, micro_batches, mean_terms)
        self.idle = not mean_terms()
        return accumulated

    def _in_stages(self, batch: Batch, samples: int, micro_batches: int) -> Accumulated:
        assert isinstance(self._model, Pipeline)
        self._model.micro_batches = micro_batches
        return self._model.accumulate(
            batch,
            lambda output, targets: self._objective.loss(output, Batch((), targets)),
            weight=self._objective.weight if samples else _nothing,
            across_ranks=True,
            backward=self._backward,
            forward_context=self._precision.autocast,
        )

    def _of_replicas(self, parts: Parts, micro_batches: int) -> list[Accumulated]:
        replicas = self._optimizer.replicas
        terms = [self._objective.weight(batch) if samples else 0.0 for batch, samples in parts]
        mean_terms = functools.cache(replicas.begin_mean(terms))
        accumulated = []
        for replica, (batch, samples) in zip(self._optimizer.local_replicas(), parts):
            with replica:
                one = self._in_turn(batch.to(self._device), samples, micro_batches, mean_terms)
                accumulated.append(one)
                if self._config.batch_norm == "deferred":
                    commit_batch_norm(self._model, discard=not samples)
        return accumulated

    def _loss(self, batch: Batch) -> Tensor:
        with self._precision.autocast():
            return self._objective.loss(self._model(*batch.inputs, **batch.shared), batch)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._precision.backward(loss, self._optimizer, last)


def micro_batches_of(config: Config, sampler: DistributedSampler, position: int) -> int:
    """The number of micro-batches: equal on every rank where each communicates, so at most the samples of the smallest part."""
    communicates = config.batch_norm == "synchronized" or config.shard_stage == 3
    if not communicates or sampler.length is None:
        return config.accumulate
    ranks: int = hvd.size()
    left = min(sampler.length - position, config.batch * ranks)
    return min(config.accumulate, max(left // ranks, 1))


def _nothing(_: Batch) -> float:
    return 0.0
