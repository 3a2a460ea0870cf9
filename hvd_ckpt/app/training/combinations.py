"""Settings of a training run that must, or must not, be given together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvd_ckpt.utils.named import is_named
from hvd_ckpt.utils.text import STAGES

if TYPE_CHECKING:
    from hvd_ckpt.app.training.config import Config

ACROSS_RANKS = ("deferred-ranks", "synchronized")  # batch norms whose statistics are those of all ranks
OF_LOCAL_SGD = ("outer_lr", "outer_momentum", "fragments", "delay")


def check_combinations(config: Config) -> None:
    """Raises ValueError for the first settings that cannot be combined. The message names them and says what to do."""
    if config.steps is not None and config.epochs is not None:
        raise ValueError(f"steps {config.steps} and epochs {config.epochs}: give one of them")
    if config.tokens is not None and config.text is not None:
        raise ValueError(f"text {config.text} and tokens {config.tokens}: give one of them")
    if config.documents is not None and config.text is None:
        raise ValueError(f"documents {config.documents}: they are lines of a text, give text as well")
    for name in ("vocabulary", "token_type"):
        if getattr(config, name) is not None and config.tokens is None:
            raise ValueError(f"{name} {getattr(config, name)}: it is of token ids, give tokens as well")
    recomputing = [name for name in ("budget", "plan", "segments") if getattr(config, name) is not None]
    if len(recomputing) > 1:
        raise ValueError(f"{' and '.join(recomputing)}: give one of them, each sets what is recomputed")
    if config.plan_cache is not None and config.budget is None:
        raise ValueError(f"plan_cache {config.plan_cache}: it keeps plans for a budget, give budget as well")
    if config.reentrant and config.segments is None:
        raise ValueError("reentrant: it is a variant of recomputing segments, give segments as well")
    if config.accumulate > config.batch:
        raise ValueError(
            f"accumulate {config.accumulate}: it is more than the batch of {config.batch} samples"
        )
    if config.ema is not None and config.precision.startswith("apex"):
        raise ValueError(f"ema {config.ema}: Apex replaces the parameters, give precision fp16 or bf16")
    if config.patience is not None and (config.eval_every is None or not config.validation_split):
        raise ValueError(
            f"patience {config.patience}: it counts evaluations, give eval_every and validation_split as well"
        )
    if config.prompt is not None and is_named(config.model):
        raise ValueError(f"prompt {config.prompt}: it is for models of the catalogue, leave it out")
    if config.resume is not None and config.output is not None:
        raise ValueError(f"output {config.output}: a resumed run writes to its own folder, leave it out")
    _check_local(config)
    _check_sharding(config)
    _check_stages(config)
    _check_tensor(config)
    _check_replicas(config)


def _default(config: Config, name: str) -> object:
    return type(config).model_fields[name].default


def _is_given(config: Config, name: str) -> bool:
    return bool(getattr(config, name) != _default(config, name))


def _refuse(config: Config, setting: str, others: Iterable[tuple[str, bool, str]]) -> None:
    """Refuses a setting with the first of others that is wrong with it: its name, whether it is wrong, and the reason."""
    for name, wrong, reason in others:
        if wrong:
            raise ValueError(
                f"{setting} {getattr(config, setting)} and {name} {getattr(config, name)}: {reason}"
            )


def _check_local(config: Config) -> None:
    if config.local_steps is None:
        for name in OF_LOCAL_SGD:
            if _is_given(config, name):
                raise ValueError(
                    f"{name} {getattr(config, name)}: it is for local SGD, give local_steps as well"
                )
        if config.within is not None and (config.in_stages or not config.splits_parameters):
            raise ValueError(
                f"within {config.within}: it is for local SGD and for shard {STAGES[3]} without stages, give one of them as well"
            )
        return
    for name in ("fragments", "delay"):
        if getattr(config, name) > config.local_steps:
            raise ValueError(
                f"{name} {getattr(config, name)}: give at most local_steps, {config.local_steps}"
            )
    if config.outer_momentum is not None and config.outer_lr is None:
        raise ValueError(
            f"outer_momentum {config.outer_momentum}: it is the outer optimizer's, give outer_lr as well"
        )
    _refuse(config, "local_steps", (
        ("wire", config.wire == "int4", "it is for sharded gradients, give int8"),
        ("shard", config.is_sharded and config.within is None, "it splits over the ranks of a group, give within as well"),
        ("accumulate_locally", config.accumulate_locally, "gradients are reduced within groups in each step, leave it out"),
        ("stages", config.in_stages, "each rank steps on a whole model, leave it out"),
        ("replicas", _is_given(config, "replicas"), "ranks that step on their own have different weights, leave it out"),
        ("ema", config.ema is not None, "ranks have weights of their own between averages, leave it out"),
        ("compression", config.compression != "none", f"gradients stay on their rank, give wire {config.compression}"),
        ("bucket_cap_mb", _is_given(config, "bucket_cap_mb"), "averages have other buckets, leave it out"),
        ("batch_norm", config.batch_norm in ACROSS_RANKS, "each step would wait for all ranks, give local or deferred"),
        ("check_weights", config.check_weights is not None, "ranks have weights of their own between averages, leave it out"),
        ("precision", config.precision.startswith("apex"), "Apex replaces the parameters, give fp16 or bf16"),
    ))  # fmt: skip


def _check_sharding(config: Config) -> None:
    needs_gradients = f"it is for sharded gradients, give shard {STAGES[2]} or {STAGES[3]} as well"
    if config.offload is not None and not config.is_sharded:
        raise ValueError(
            f"offload {config.offload}: it is for sharded runs, give shard {STAGES[1]} or more as well"
        )
    if config.offload == "parameters" and not config.splits_parameters:
        raise ValueError(
            f"offload parameters: whole parameters stay in memory, give shard {STAGES[3]} as well"
        )
    if config.offload_folder is not None and config.offload is None:
        raise ValueError(
            f"offload_folder {config.offload_folder}: nothing is offloaded, give offload as well"
        )
    if config.wire != "fp32" and not config.splits_gradients and config.local_steps is None:
        raise ValueError(
            f"wire {config.wire}: it is for sharded gradients or averages, give shard {STAGES[2]} or {STAGES[3]}, or local_steps"
        )
    if config.accumulate_locally and not config.splits_gradients:
        raise ValueError(f"accumulate_locally: {needs_gradients}")
    if config.splits_gradients and config.compression != "none":
        raise ValueError(
            f"compression {config.compression}: sharded gradients are not allreduced, give wire {config.compression} instead"
        )
    if config.is_sharded and config.precision.startswith("apex"):
        raise ValueError(
            f"shard {config.shard}: Apex replaces the parameters after they were split, give precision fp16 or bf16"
        )


def _check_stages(config: Config) -> None:
    if not config.in_stages:
        if config.checkpoint == "auto":
            raise ValueError("checkpoint auto: it is for pipeline stages, give stages as well")
        for name in ("pipeline_schedule", "virtual_stages", "balance"):
            if _is_given(config, name):
                raise ValueError(
                    f"{name} {getattr(config, name)}: it is for pipeline stages, give stages as well"
                )
        return
    if config.virtual_stages is not None and config.pipeline_schedule != "interleaved":
        raise ValueError(
            f"virtual_stages {config.virtual_stages}: it is for pipeline_schedule interleaved, give that as well"
        )
    if config.balance is not None and len(config.balance) != config.parts_of_model:
        raise ValueError(
            f"balance {config.balance}: it has {len(config.balance)} numbers of blocks, give one for each of "
            f"{config.parts_of_model} parts"
        )
    if config.segments is not None:
        raise ValueError(
            f"segments {config.segments}: each stage is one segment, give checkpoint or a budget"
        )
    if config.budget is not None or config.plan is not None:
        for name, chosen in (("balance", None), ("checkpoint", "auto")):
            if getattr(config, name) not in (_default(config, name), chosen):
                raise ValueError(f"{name} {getattr(config, name)}: the plan chooses it, leave it out")
    if config.precision.startswith("apex"):
        raise ValueError(f"stages {config.stages}: Apex wants the whole model, give precision fp16 or bf16")
    if config.optimizer.strip().lower() == "adafactor":
        raise ValueError(
            f"optimizer {config.optimizer}: snapshots of stages need a state with a value for each element, give adamw"
        )


def _check_tensor(config: Config) -> None:
    if config.tensor == 1:
        return
    _refuse(config, "tensor", (
        ("local_steps", config.local_steps is not None, "each rank steps on a whole model, leave it out"),
        ("replicas", _is_given(config, "replicas"), "logical replicas are of whole models, leave it out"),
        ("precision", config.precision.startswith("apex"), "Apex wants whole gradients, give fp16 or bf16"),
        ("offload", config.offload == "parameters", "its files hold whole layers, leave it out"),
        ("prompt", config.prompt is not None, "only whole models generate text, leave it out"),
        ("optimizer", config.optimizer.strip().lower() == "adafactor", "its state has no value for each element, give adamw"),
    ))  # fmt: skip


def _check_replicas(config: Config) -> None:
    replicas = config.replicas
    if replicas is None:
        return
    if replicas & (replicas - 1):
        raise ValueError(f"replicas {replicas}: it is not a power of two, give 1, 2, 4, 8, ...")
    _refuse(config, "replicas", (
        ("stages", _is_given(config, "stages"), "stages add up gradients by rank, leave it out"),
        ("shard", config.splits_parameters, f"replicas are added up as whole gradients, give {STAGES[2]} or less"),
        ("wire", config.wire != "fp32", "it rounds what ranks send, leave it out"),
        ("compression", config.compression != "none", "it rounds the sums of ranks, leave it out"),
        ("batch_norm", config.batch_norm in ACROSS_RANKS, "its statistics depend on the ranks, give local or deferred"),
        ("precision", config.precision.startswith("apex"), "Apex reduces after one backward pass, give fp16 or bf16"),
    ))  # fmt: skip
