"""The first steps of a start, which :class:`~.trainer.Trainer` takes: model and optimizer of one rank, and where the run starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvd_ckpt.app.training.build import Assembly, check_functions
from hvd_ckpt.app.training.callbacks import callbacks_of
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.ending import config_errors, errors_everywhere
from hvd_ckpt.app.training.field_types import first_and_last
from hvd_ckpt.app.training.model import device_of, precision_of, prepare_model
from hvd_ckpt.app.training.modes import mode_of
from hvd_ckpt.app.training.optim import Schedule, build_optimizer, freeze
from hvd_ckpt.app.training.own import Stream
from hvd_ckpt.app.training.resume import Progress, ResumePoint, find_resume_point, read_snapshot
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.distributed.precision import Precision
from hvd_ckpt.parallel.tensor.recipes import tensor_parallel
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction.weights import verify_weights
from hvd_ckpt.snapshots.lock import FolderLock
from hvd_ckpt.snapshots.reader import Snapshot

DEFAULT_STEPS = 100


@dataclass
class OneRank:
    """Model and optimizer of one rank, which are not distributed yet.

    Attributes:
        parts: model, loss and samples. The model is on its device, except where it is to be cut into stages.
        optimizer: optimizer of the model.
        sampler: the order of the samples to train on.
        device, precision: device and precision of the passes.
        callbacks: callbacks of this process.
    """

    parts: Assembly
    optimizer: torch.optim.Optimizer
    sampler: DistributedSampler
    device: torch.device
    precision: Precision
    callbacks: list[Any]

    @classmethod
    def make(cls, config: Config, parts: Assembly) -> OneRank:
        """Those of a configuration. Collective.

        Raises:
            ConfigError: a setting does not fit the model; raised on every rank.
        """
        # Nothing in it communicates, so that a rank that fails can tell the others.
        with errors_everywhere("hvd_ckpt.train.settings"):
            if config.deterministic:
                use_deterministic_kernels()
            if not config.verify.weights:
                verify_weights(False)
            device = device_of(config)
            shuffle = not isinstance(parts.train, Stream)
            sampler = DistributedSampler(
                parts.train, config.batch, seed=config.seed, epochs=config.epochs, shuffle=shuffle
            )
            precision = precision_of(config, device)
            callbacks = callbacks_of(config)
            if config.freeze is not None:
                freeze(parts.model, config.freeze)
            parts = parts._replace(model=prepare_model(parts.model, config, device))
            optimizer = build_optimizer(
                config.optimizer,
                parts.model,
                config.lr,
                config.weight_decay,
                options=config.optimizer_options,
                layer_decay=config.layer_decay,
            )
            check_functions(config, parts)
        # Parts compare their models, so that this communicates.
        if config.tensor > 1:
            with config_errors():
                tensor_parallel(parts.model)
        return cls(parts, optimizer, sampler, device, precision, callbacks)


@dataclass
class Start:
    """Where a run starts: at its beginning, or at a snapshot.

    Attributes:
        folder: folder of logs, plan, pictures and snapshots.
        lock: holds the folder, on the first process.
        snapshot: the snapshot, whose weights rank 0 has loaded; None for the beginning.
        progress: how far the run has come.
        steps: number of steps of the whole run.
        first_ranks: number of ranks with which the run began.
        schedule: schedule of the learning rate.
    """

    folder: Path
    lock: FolderLock | None
    snapshot: Snapshot | None
    progress: Progress
    steps: int
    first_ranks: int
    schedule: Schedule

    @classmethod
    def find(cls, config: Config, one: OneRank, point: ResumePoint | None, undo: ExitStack) -> Start:
        """The start of a run. Collective.

        Args:
            point: the start and the folder; by default as configured.
            undo: releases the folder.

        Raises:
            ConfigError: a folder or snapshot cannot be used, or another run uses the folder; raised on every rank.
        """
        point = point or find_resume_point(config)
        parts, lock = one.parts, None
        with errors_everywhere("hvd_ckpt.train.snapshot"):
            if current().number == 0 and not config.dry_run:
                lock = FolderLock(point.folder)
                undo.callback(lock.release)
            snapshot = read_snapshot(point, config, len(parts.train), parts.model, one.optimizer)
            progress, first_ranks = Progress(), hvd.size()
            if snapshot is not None:
                progress = Progress(**snapshot.replicated["progress"])
                first_ranks = snapshot.replicated["ranks"]
            left = one.sampler.batches_left(progress.position, config.global_batch(hvd.size()))
            steps = (config.steps or DEFAULT_STEPS) if left is None else progress.step + left
            if config.profile is not None and first_and_last(config.profile)[0] > steps:
                raise ValueError(f"profile {config.profile}: the run ends after step {steps}")
            scales = is_elastic() and mode_of(config).scales_rate
            rate = config.lr * (hvd.size() / first_ranks if scales else 1.0)
            schedule = Schedule(config.schedule, rate, steps, config.warmup)
        return cls(point.folder, lock, snapshot, progress, steps, first_ranks, schedule)
