"""Settings of a training run that must, or must not, be given together: what a configuration gives to the rules, and sums of
settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.utils import rules
from hvd_ckpt.utils.named import is_named

if TYPE_CHECKING:
    from hvd_ckpt.app.training.config import Config


def check_combinations(config: Config) -> None:
    """Raises ValueError for the first settings that cannot be combined. The message names them and says what to do."""
    rules.check(_features(config), write=rules.setting)
    if config.accumulate > config.batch:
        raise ValueError(
            f"accumulate {config.accumulate}: it is more than the batch of {config.batch} samples"
        )
    if config.local_steps is not None:
        for name in ("fragments", "delay"):
            if getattr(config, name) > config.local_steps:
                raise ValueError(
                    f"{name} {getattr(config, name)}: give at most local_steps, {config.local_steps}"
                )
    if config.balance is not None and len(config.balance) != config.parts_of_model:
        raise ValueError(
            f"balance {config.balance}: it has {len(config.balance)} numbers of blocks, give one for each of "
            f"{config.parts_of_model} parts"
        )
    if config.replicas is not None and config.replicas & (config.replicas - 1):
        raise ValueError(f"replicas {config.replicas}: it is not a power of two, give 1, 2, 4, 8, ...")


def _features(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, and what follows from several of them."""
    fields = type(config).model_fields
    given = {name: getattr(config, name) for name in fields if getattr(config, name) != fields[name].default}
    planned = config.budget is not None or config.plan is not None
    return {
        **given,
        "model": config.model,
        "module:function": is_named(config.model),
        "optimizer": config.optimizer.strip().lower(),
        "wire of gradients": given.get("wire"),
        rules.ELASTIC: is_elastic(),
        "a plan of stages": config.in_stages and planned,
    }
