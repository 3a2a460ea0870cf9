"""Local SGD in a run: its optimizer, and the snapshots from which a run may resume."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.distributed.shard import Shard
from hvd_ckpt.parallel.local_sgd.construction import LocalSGD
from hvd_ckpt.parallel.local_sgd.optimizer import LocalOptimizer
from hvd_ckpt.parallel.local_sgd.options import Nesterov
from hvd_ckpt.snapshots.reader import Snapshot

# Settings that a period begins and ends with.
OF_A_PERIOD = ("local", "shard")


def make_local(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> LocalOptimizer:
    """The ``LocalSGD`` of a run. Collective.

    Raises:
        ConfigError: the settings are not for an elastic job, or the ranks do not have such groups; raised on every rank.
    """
    local = config.local
    assert local is not None
    momentum = 0.9 if local.outer_momentum is None else local.outer_momentum
    try:
        return LocalSGD(
            optimizer,
            list(model.named_parameters()),
            every=local.every,
            outer=None if local.outer_lr is None else Nesterov(local.outer_lr, momentum),
            fragments=local.fragments,
            delay=local.delay,
            wire=local.wire,
            within=local.within,
            shard=Shard(
                config.shard.states, offload=config.shard.offload, offload_folder=config.shard.folder
            ),
            model=model,
            elastic=True,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"local {local}: {error}") from None


def check_period(config: Config, resumed: Snapshot) -> None:
    """Raises ConfigError if ranks have weights of their own in a snapshot, and the run has other ranks or other periods."""
    # Between periods all ranks have the same weights, so any number of ranks and any settings may follow.
    if not resumed.replicated["mid_period"]:
        return
    then = resumed.replicated["config"]
    within = f"the snapshot of step {resumed.step} lies within a period of local SGD, where ranks have weights of their own"
    way_out = "or resume from a snapshot of a period's end (one fragment, no delay)"
    for name in OF_A_PERIOD:
        if then[name] != config.as_dict()[name]:
            raise ConfigError(f"{name} {getattr(config, name)}: {within}: give {then[name]}, {way_out}")
    ranks = resumed.replicas
    if ranks != hvd.size():
        raise ConfigError(f"resume on {hvd.size()} ranks: {within}: start {ranks} ranks, {way_out}")
