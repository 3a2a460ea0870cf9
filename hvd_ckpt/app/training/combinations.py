"""Settings of a training run that must, or must not, be given together: what a configuration gives to the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.training.field_types import WithOptions
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.utils import rules
from hvd_ckpt.utils.named import is_named

if TYPE_CHECKING:
    from hvd_ckpt.app.training.config import Config


def check_combinations(config: Config) -> None:
    """Raises ValueError for the first settings that cannot be combined. The message names them and says what to do."""
    rules.check(_features(config), {"stages": f"pipeline {config.pipeline.stages}"}, write=rules.setting)
    if config.accumulate > config.batch:
        raise ValueError(
            f"accumulate {config.accumulate}: it is more than the batch of {config.batch} samples"
        )
    balance, parts = config.pipeline.balance, config.pipeline.parts_of_model
    if balance is not None and len(balance) != parts:
        raise ValueError(
            f"balance {balance}: it has {len(balance)} numbers of blocks, give one for each of {parts} parts"
        )
    if config.replicas is not None and config.replicas & (config.replicas - 1):
        raise ValueError(f"replicas {config.replicas}: it is not a power of two, give 1, 2, 4, 8, ...")


def _features(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, with their options, and what follows from several of them."""
    given: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value == field.default:
            continue
        if isinstance(value, WithOptions):
            options = value.given()
            first = next(iter(type(value).model_fields))
            value = options.pop(first, True if name == "verify" else None) if name != "pipeline" else None
            given |= {
                OPTIONS.get((name, option), f"{option} of {name}"): set for option, set in options.items()
            }
        given[name] = value
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


OPTIONS = {("pipeline", name): name for name in ("stages", "virtual_stages", "balance")}
OPTIONS |= {
    ("local", name): name for name in ("outer_lr", "outer_momentum", "fragments", "delay", "wire", "within")
}
OPTIONS |= {("shard", name): name for name in ("wire", "offload", "accumulate_locally", "within")}
