"""Modes of a run: how its ranks share the work of a step.

A global batch has parts, and each rank computes some of them:

- :class:`Plain`: one part for each rank, and all ranks average their gradients.
- :class:`Stages`: one part for each replica of the pipeline, whose blocks are on different ranks.
- :class:`Replicas`: one part for each logical replica; the number of ranks does not change the order in which gradients are added.
- :class:`Local`: one part for each rank, which steps on its own; the ranks average their weights at intervals.

In each step of any mode the loop calls :meth:`~Plain.run` and :meth:`~Plain.finish`, then :meth:`~Plain.skip`, or
:meth:`~Plain.clip` (if configured) and :meth:`~Plain.step`. Sharding (ZeRO) can be combined with each mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ckpt.app.training.config import Config, config_errors
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.batchnorm import commit_batch_norm
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.distributed.clipping import clip_grad_norm_
from hvd_ckpt.distributed.optimizer import DistributedOptimizer
from hvd_ckpt.distributed.shard import Shard
from hvd_ckpt.parallel.local_sgd.construction import LocalSGD, Nesterov
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated, accumulate
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.communicator import Compression
from hvd_ckpt.reduction.leveling import agree_on_naming
from hvd_ckpt.utils.spans import span

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer

Aliases = Mapping[str, str]
"""Further names of tied parameters, and the name that the optimizer knows: on each pipeline stage a parameter may have another."""

Parts = Sequence[tuple[Batch, int]]
"""Batches, and the samples of each: 0 if it has no weight, and is only there so that its owner takes part."""

MeanTerms = Callable[[], float] | None


def distribute(config: Config, model: nn.Module, optimizer: Optimizer, aliases: Aliases) -> Any:
    """The optimizer of all ranks: a ``DistributedOptimizer``, sharded if configured, or that of ``LocalSGD``. Collective.

    Args:
        model: on its device and with its plan, since blocks that are recomputed together are gathered together at stage 3.

    Raises:
        ConfigError: the job or the optimizer cannot be sharded, or there is no room for offloaded state; raised on every rank.
    """
    given, local, options = config.shard, config.local, dict[str, Any]()
    shard = Shard(
        given.states, wire=given.wire, offload=given.offload, offload_folder=given.folder, within=given.within
    )
    about = f"local {local}" if local is not None else f"shard {given}" if given.stage else ""
    # Each stage has a world of its own, in which an error is raised on all; the other stages must hear of it, too.
    with errors_everywhere("hvd_ckpt.train.distribute"), config_errors(OSError, about=about):
        if local is not None:
            options = dict(local)
            rate, momentum = options.pop("outer_lr"), options.pop("outer_momentum")
            options["outer"] = None if rate is None else Nesterov(rate, momentum or 0.9)
            named = list(model.named_parameters())
            return LocalSGD(optimizer, named, shard=shard, model=model, elastic=True, **options)
        if given.stage:
            options["shard"] = shard
            options["backward_passes_per_step"] = config.accumulate if given.accumulate_locally else 1
        if given.stage == 3 or config.replicas is not None:
            options |= {"model": model, "replicas": config.replicas}
        distributed: Any = DistributedOptimizer(
            optimizer,
            named_parameters=[(aliases.get(name, name), each) for name, each in model.named_parameters()],
            compression=getattr(Compression, config.compression),
            bucket_cap_mb=config.bucket_cap_mb,
            **options,
        )
    # Ranks that have joined the job later have made fewer optimizers, and names of collectives count these.
    if is_elastic():
        agree_on_naming(distributed)
    if config.replicas is not None:
        distributed.replicas.seed = config.seed
    return distributed


class Plain:
    """Each rank computes one part of a global batch, and all ranks take the same step. The other modes override what differs.

    Args:
        run: its model has its plan and is in pipeline stages if configured; its optimizer is the result of :func:`distribute`.

    Attributes:
        parts: the number of parts of a global batch that this rank computes.
    """

    def __init__(self, run: Trainer) -> None:
        ranks: int = hvd.size()
        self.config = config = run.config
        self.parts = config.parts_of_batch(ranks) // ranks
        self._model, self._optimizer, self._device = run.model, run.optimizer, run.device
        self._objective, self._precision = run.objective, run.precision
        self._skips = config.on_nan == "skip"
        self._buffers: Any = None  # before the step, where it may be skipped

    # -------------------------------------------------------------------------------- in each step

    def micro_batches(self, sampler: DistributedSampler, position: int) -> int:
        """The number of micro-batches: equal on every rank where each communicates, so at most the samples of the smallest part."""
        config = self.config
        communicates = config.shard.stage == 3 or config.batch_norm == "synchronized"
        if not communicates or sampler.length is None:
            # Without messages in a forward pass, ranks may run different numbers of micro-batches.
            return config.accumulate
        ranks: int = hvd.size()
        left = min(sampler.length - position, config.batch * ranks)
        return min(config.accumulate, max(left // ranks, 1))

    def run(self, parts: Parts, micro_batches: int) -> list[Accumulated]:
        """The gradients of this rank's parts; returns loss and terms of each."""
        # Forward passes write batch norms' statistics before anyone knows whether the step will be skipped.
        self._buffers = self._copy_buffers() if self._skips else None
        return self._run_parts(parts, micro_batches)

    def finish(self, parts: Parts, skipped: bool) -> None:
        """Updates the statistics of deferred batch norms after the reduction, or takes back what the passes have changed."""
        # A rank without samples has run a stand-in batch, whose statistics do not count.
        self._commit_statistics(discard=skipped or not parts[0][1])
        if skipped:
            self._restore_buffers()

    def skip(self) -> None:
        """Passes over a step. All ranks do, so nothing has to be told."""

    def clip(self, norm: float) -> None:
        """Clips the reduced gradients."""
        self._precision.unscale(self._optimizer)
        clip_grad_norm_(self._model.parameters(), norm)

    def step(self, accumulated: Sequence[Accumulated]) -> None:
        """The optimizer's step, on what :meth:`run` has returned."""
        self._precision.step(self._optimizer)

    # -------------------------------------------------------------------------------- between steps

    def evaluated(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights and buffers that are evaluated, the same on every rank. Collective."""
        return nullcontext()

    # -------------------------------------------------------------------------------- what modes override

    def _run_parts(self, parts: Parts, micro_batches: int) -> list[Accumulated]:
        # All modes but replicas have one part on each rank.
        ((batch, samples),) = parts
        return [self._run_part(batch.to(self._device), samples, micro_batches)]

    def _run_part(
        self, batch: Batch, samples: int, micro_batches: int, mean_terms: MeanTerms = None
    ) -> Accumulated:
        return accumulate(
            self._loss,
            batch,
            micro_batches,
            checkpoint=self.config.checkpoint,
            weight=self._objective.weight if samples else _nothing,
            across_ranks=True,
            mean_terms=mean_terms,
            backward=self._backward,
        )

    def _loss(self, batch: Batch) -> Tensor:
        with self._precision.autocast():
            return self._objective.loss(self._model(*batch.inputs, **batch.shared), batch)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._precision.backward(loss, self._optimizer, last)

    def _commit_statistics(self, discard: bool) -> None:
        kind = self.config.batch_norm
        if kind.startswith("deferred"):
            commit_batch_norm(self._model, across_ranks=kind == "deferred-ranks", discard=discard)

    def _copy_buffers(self) -> Any:
        return [buffer.clone() for buffer in self._model.buffers()]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for buffer, before in zip(self._model.buffers(), self._buffers):
            buffer.copy_(before)


class Stages(Plain):
    """Pipeline stages: the model is a :class:`~hvd_ckpt.Pipeline`, whose stages compute the parts of a batch together."""

    _model: Any

    def evaluated(self) -> AbstractContextManager[None]:
        # Batches of an evaluation are as small as micro-batches, and follow one another through the stages.
        self._model.micro_batches = 1
        return nullcontext()

    def _run_part(
        self, batch: Batch, samples: int, micro_batches: int, mean_terms: MeanTerms = None
    ) -> Accumulated:
        self._model.micro_batches = micro_batches
        return self._model.accumulate(
            batch,
            lambda output, targets: self._objective.loss(output, Batch((), targets)),
            weight=self._objective.weight if samples else _nothing,
            across_ranks=True,
            backward=self._backward,
            forward_context=self._precision.autocast,
        )


class Replicas(Plain):
    """Logical replicas: each part has its own random state and buffers, so results do not depend on the number of ranks."""

    def evaluated(self) -> AbstractContextManager[None]:
        self._replicas.average_buffers()
        return nullcontext()

    @property
    def _replicas(self) -> Any:
        return self._optimizer.replicas

    def _run_parts(self, parts: Parts, micro_batches: int) -> list[Accumulated]:
        # The losses of all replicas are weighed together, so the mean of their terms is on its way before the first forward pass.
        terms = [self._objective.weight(batch) if samples else 0.0 for batch, samples in parts]
        mean_terms = functools.cache(self._replicas.begin_mean(terms))
        accumulated = []
        for replica, (batch, samples) in zip(self._optimizer.local_replicas(), parts):
            with replica:
                accumulated.append(self._run_part(batch.to(self._device), samples, micro_batches, mean_terms))
                # Here, and not in finish(): outside of the context the model's buffers are not this replica's.
                super()._commit_statistics(discard=not samples)
        return accumulated

    def _commit_statistics(self, discard: bool) -> None:
        """Each replica has done so."""

    def _copy_buffers(self) -> Any:
        return self._replicas.buffers()

    def _restore_buffers(self) -> None:
        self._replicas.restore_buffers(self._buffers)


class Local(Plain):
    """Local SGD: each rank, or group of ranks, steps on its own, and all average their weights at intervals."""

    def __init__(self, run: Trainer) -> None:
        super().__init__(run)
        # A run that has to stop continues to the next entry of the log, where all ranks hear of it; steps until then are skipped.
        self._skips = run.config.on_nan in ("skip", "stop")
        self._idle = False  # no rank of this rank's group had any terms in the last step

    def skip(self) -> None:
        with span("update"), self._optimizer.skip_synchronize():
            self._only_average()

    def clip(self, norm: float) -> None:
        if not self._idle:
            super().clip(norm)

    def step(self, accumulated: Sequence[Accumulated]) -> None:
        if self._idle:
            self._only_average()
            return
        # A rank counts in the next average by its terms. A scaler may skip the step after it was weighed, so it is not.
        if self._precision.scaler is None:
            self._optimizer.weigh(accumulated[0].weight)
        super().step(accumulated)

    def _only_average(self) -> None:
        # The other ranks step and average, so this one takes part in their averages all the same, and counts for nothing.
        with self._optimizer.without_reduction():
            pass

    def evaluated(self) -> AbstractContextManager[None]:
        averaged: AbstractContextManager[None] = self._optimizer.averaged()
        return averaged

    def _run_part(
        self, batch: Batch, samples: int, micro_batches: int, mean_terms: MeanTerms = None
    ) -> Accumulated:
        terms = float(self._objective.weight(batch)) if samples else 0.0
        of_group = self._optimizer.begin_group_mean(terms)
        accumulated = super()._run_part(batch, samples, micro_batches, of_group)
        self._idle = not of_group()
        return accumulated


def mode_of(config: Config) -> type[Plain]:
    """The configured mode. The settings of two modes cannot be combined."""
    if config.local is not None:
        return Local
    if config.replicas is not None:
        return Replicas
    return Stages if config.in_stages else Plain


def _nothing(_: Batch) -> float:
    return 0.0
