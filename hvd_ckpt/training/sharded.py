"""The ``DistributedOptimizer`` of a run, sharded or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvd_ckpt.distributed import DistributedOptimizer
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.training.config import Config, ConfigError

__all__ = ["check_job", "distributed"]


def check_job(config: Config) -> None:
    """Raises ConfigError if a job of this kind cannot split what the configuration says."""
    if config.stage and is_elastic():
        raise ConfigError(
            f"shard {config.shard}: ranks of an elastic job come and go, and take what they hold with them, leave it out"
        )


def distributed(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> Any:
    """The ``DistributedOptimizer`` of a run. Collective.

    Args:
        model: on its device, and recomputed as it will be: what is recomputed together is gathered together at stage 3.

    Raises:
        ConfigError: the optimizer cannot be split, or there is no room for what is offloaded; on every rank alike.
    """
    options: dict[str, Any] = {
        "compression": getattr(Compression, config.compression),
        "bucket_cap_mb": config.bucket_cap_mb,
    }
    if not config.stage:
        return DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    options.update(
        shard=config.shard,
        offload=config.offload,
        offload_folder=config.offload_folder,
        wire=config.wire,
        backward_passes_per_step=config.accumulate if config.accumulate_locally else 1,
    )
    if config.stage == 3:
        options["model"] = model
    try:
        return DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    except (ValueError, OSError) as error:
        raise ConfigError(f"shard {config.shard}: {error}") from None
