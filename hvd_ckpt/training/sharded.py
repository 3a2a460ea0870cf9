"""What a run whose state is split over the ranks does differently: how its optimizer is made, and what its snapshots hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.distributed import DistributedOptimizer
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.snapshots.shards import OwnShard, names_of
from hvd_ckpt.training.config import Config, ConfigError

__all__ = ["RunShards", "check_job", "distributed"]


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


class RunShards:
    """What snapshots of a run hold of the state that its ranks share out. To be made before the optimizer is distributed.

    Args:
        model: whose parameters are whole still.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.stage = config.stage
        self._lossy = config.wire != "fp32"
        self._parameters, self._aliases = names_of(model)
        known = {*self._parameters, *self._aliases}
        self._buffers = [name for name in model.state_dict() if name not in known]

    @property
    def splits_weights(self) -> bool:
        """Whether the exact weights are in the ranks' shards alone."""
        return self.stage == 3 or (self.stage > 0 and self._lossy)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """What rank 0 writes of the model: its ``state_dict()``, or its buffers where the ranks have the weights."""
        if not self.splits_weights:
            return model.state_dict()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {name: buffers[name] for name in self._buffers}

    def own(self, optimizer: Any, averages: Mapping[int, Tensor] | None) -> OwnShard | None:
        """What this rank writes of its shards, and of their averages; None where nothing is split. Tensors are not copied."""
        if not self.stage:
            return None
        weights = optimizer.weight_pieces() if self.splits_weights else None
        state = optimizer.state_dict()
        return OwnShard(self.stage, self._parameters, self._aliases, state, weights, averages)

    def publish(self, optimizer: Any) -> None:
        """Has the model's weights be what they were after the last step: what a lossy wire made of the exact ones. Collective."""
        if self.splits_weights and self.stage < 3:
            store, layout = optimizer._sharding.store, optimizer._sharding.layout
            store.publish([group for group in layout.groups if group.requires_grad])
