"""The model of one rank: device, batch norm, recomputation, pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.batchnorm import DeferredBatchNorm, SyncBatchNorm
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.parallel.pipeline.pipeline import Pipeline
from hvd_ckpt.parallel.pipeline.random_state import seed_blocks
from hvd_ckpt.processes.devices import NO_GPU_OPERATIONS, device_named, has_gpu_operations, local_device
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute import CheckpointSequential
from hvd_ckpt.reduction.construction import warn_of_unsynchronized
from hvd_ckpt.utils.text import BUILD_HOROVOD
from hvd_ckpt.utils.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer

# ------------------------------------------------------------------------------------ device


def device_of(config: Config) -> torch.device:
    """The configured device; by default, this process's own GPU, or the CPU if Horovod cannot use a GPU.

    Raises:
        ConfigError: it does not exist, is neither a CPU nor a CUDA device, or Horovod has no operations on it.
    """
    with config_errors(RuntimeError):
        device = local_device() if config.device is None else device_named(config.device)
        if config.device is not None and device.type != "cpu":
            if not has_gpu_operations():
                raise ValueError(f"device '{device}': {NO_GPU_OPERATIONS}, {BUILD_HOROVOD}")
            device = local_device() if device.index is None else device
            torch.cuda.set_device(device)
    return device


# ------------------------------------------------------------------------------------ batch norm and recomputation


def prepare_model(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model on its device, with the configured kind of batch norm, recomputed in segments if configured.

    Each block of a chain has a random state of its own, so that dropout draws the same numbers in any number of pipeline stages.
    With stages the model stays where it is: each rank's device is to hold its blocks only.

    Raises:
        ConfigError: it has no batch norm, is not a chain, or has fewer blocks than segments.
    """
    _check_grid(model, config)
    kind = type(model).__name__
    # A model that will be cut may be larger than a device: only this rank's part of it moves there, in cut_into_stages.
    if not config.in_stages:
        model = model.to(device)
    model = convert_batch_norms(model, config)
    # After the conversion, so that only batch norms that stay as they are count.
    warn_of_unsynchronized(model)
    segments = config.segments
    if segments is None:
        return seed_blocks(model) if isinstance(model, nn.Sequential) else model
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f"segments {segments}: this {kind} is not a chain of blocks, give a budget")
    if segments.number > len(model):
        raise ConfigError(f"segments {segments}: this model has {len(model)} blocks, give at most that many")
    if isinstance(model, Chain):
        model.checkpoint_interval = -(-len(model) // segments.number)
        model.use_reentrant = segments.reentrant
        return seed_blocks(model)
    return seed_blocks(CheckpointSequential(model, segments.number, segments.reentrant))


def convert_batch_norms(model: nn.Module, config: Config) -> nn.Module:
    """The model with the configured kind of batch norm.

    Raises:
        ConfigError: it has no batch norm.
    """
    if config.batch_norm == "local":
        return model
    if not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        kind = type(model).__name__
        raise ConfigError(f"batch_norm {config.batch_norm}: this {kind} has no batch norm, leave it out")
    converter: Any = SyncBatchNorm if config.batch_norm == "synchronized" else DeferredBatchNorm
    converted: nn.Module = converter.convert(model)
    return converted


def _check_grid(model: nn.Module, config: Config) -> None:
    """Raises ConfigError if the job was started with other numbers of stages or parts, or the model is not a chain."""
    for name, given, started in (
        ("pipeline", config.pipeline.stages, current().stages),
        ("tensor", config.tensor, current().tensor),
    ):
        if given != started:
            raise ConfigError(
                f"{name} {given}: the job was started with {started}, give the same number to init()"
            )
    if config.in_stages and not isinstance(model, nn.Sequential):
        kind = type(model).__name__
        raise ConfigError(
            f"pipeline {config.pipeline}: this {kind} is not a chain of blocks, make it an nn.Sequential of them"
        )


def cut_into_stages(run: Trainer) -> Pipeline:
    """The model of a run in its pipeline stages, of which this rank's is on its device. Collective.

    The plan gives the cuts and the policy of each block; without a plan both are as configured. The optimizer, which has no state
    yet, keeps the parameters of this rank's stage.

    Raises:
        ConfigError: the model cannot be cut so; raised on every rank.
    """
    config, optimizer = run.config, run.optimizer
    with errors_everywhere("hvd_ckpt.train.cut"):
        if run.plan is not None:
            pipeline = Pipeline(run.model, plan=run.plan)
        else:
            pipeline = Pipeline(
                run.model,
                config.pipeline.balance,
                chunks=config.accumulate,
                schedule=config.pipeline.schedule,
                checkpoint=config.checkpoint,
                virtual_stages=config.pipeline.virtual_stages_of_each,
            )
        of_stage = set(pipeline.parameters())
        # A group may become empty. It stays, since snapshots of all stages have the same groups.
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in of_stage]
        if not any(group["params"] for group in optimizer.param_groups):
            raise ConfigError(
                f"pipeline {config.pipeline.stages}: stage {current().stage} has no parameters that are trained, give another "
                f"balance than {pipeline.balance}"
            )
    return pipeline.to(run.device)
