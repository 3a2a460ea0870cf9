"""What a run makes of its model: device, precision, recomputation, plan, pipeline stages, distributed optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.local import make_local
from hvd_ckpt.batchnorm import DeferredBatchNorm, SyncBatchNorm
from hvd_ckpt.batchnorm.synchronized import warn_of_unsynchronized
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.distributed.optimizer import DistributedOptimizer
from hvd_ckpt.distributed.precision import AUTOCAST, Precision
from hvd_ckpt.pipeline.chain import Chain
from hvd_ckpt.pipeline.pipeline import Pipeline
from hvd_ckpt.pipeline.random_state import seed_blocks
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.planner import plan
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.devices import NO_GPU_OPERATIONS, has_gpu_operations, local_device
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute import CheckpointSequential, verify_recomputation
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.agreement import of_first_process
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.reduction.leveling import agree_on_naming
from hvd_ckpt.reduction.weights import verify_weights
from hvd_ckpt.snapshots.resume import FLAT, state_of_shards
from hvd_ckpt.torch_private import AnyBatchNorm
from hvd_ckpt.utils.extras import BUILD_HOROVOD
from hvd_ckpt.utils.schema import write_text

# ------------------------------------------------------------------------------------ device and precision


def device_of(config: Config) -> torch.device:
    """The configured device: by default this process's own GPU, or the CPU where there is none that Horovod can use.

    Raises:
        ConfigError: it does not exist, is neither a CPU nor a CUDA device, or Horovod has no operations on it.
    """
    name = config.device
    try:
        device = torch.device(name or "cuda")
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N")
    if device.type == "cpu":
        return device
    if name is not None:
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device '{name}': this machine has no such device, see `hvd-ckpt doctor`")
        if not has_gpu_operations():
            raise ConfigError(f"device '{name}': {NO_GPU_OPERATIONS}, {BUILD_HOROVOD}")
    if ":" in (name or ""):
        torch.cuda.set_device(device)
        return device
    try:
        return local_device()
    except RuntimeError as error:
        raise ConfigError(f"device '{name or 'cuda'}': {error}") from None


def precision_of(config: Config, device: torch.device) -> Precision:
    """The configured precision.

    Raises:
        ConfigError: the device or a missing package rules it out.
    """
    try:
        return Precision(config.precision, device.type)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None


# ------------------------------------------------------------------------------------ batch norm and recomputation


def prepare_model(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model on its device, with the configured kind of batch norm, recomputed in segments if configured.

    Each block of a chain has a random state of its own, so that dropout draws the same numbers in any number of pipeline stages.
    With stages the model stays where it is: each rank's device is to hold its blocks only.

    Raises:
        ConfigError: it has no batch norm, is not a chain, or has fewer blocks than segments or stages.
    """
    if config.verify_recomputation is not None:
        verify_recomputation(config.verify_recomputation)
    check_stages(model, config)
    kind = type(model).__name__
    if config.stages == 1:
        model = model.to(device)
    if config.batch_norm != "local":
        if not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
            raise ConfigError(f"batch_norm {config.batch_norm}: this {kind} has no batch norm, leave it out")
        converter: Any = SyncBatchNorm if config.batch_norm == "synchronized" else DeferredBatchNorm
        model = converter.convert(model)
    warn_of_unsynchronized(model)
    if config.segments is None:
        return seed_blocks(model) if isinstance(model, nn.Sequential) else model
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f"segments {config.segments}: this {kind} is not a chain of blocks, give a budget")
    if config.segments > len(model):
        raise ConfigError(
            f"segments {config.segments}: this model has {len(model)} blocks, give at most that many"
        )
    if isinstance(model, Chain):
        model.checkpoint_interval = -(-len(model) // config.segments)
        model.use_reentrant = config.reentrant
        return seed_blocks(model)
    return seed_blocks(CheckpointSequential(model, config.segments, config.reentrant))


def check_stages(model: nn.Module, config: Config) -> None:
    """Raises ConfigError if the job has another number of pipeline stages than configured, or the model cannot be cut into them."""
    if config.stages != current().stages:
        raise ConfigError(
            f"stages {config.stages}: the job was started with {current().stages}, give the same number to init()"
        )
    if config.tensor != current().tensor:
        raise ConfigError(
            f"tensor {config.tensor}: the job was started with {current().tensor}, give the same number to init()"
        )
    if config.stages == 1:
        return
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"stages {config.stages}: this {type(model).__name__} is not a chain of blocks, make it an nn.Sequential of them"
        )
    parts, each = config.stages * config.virtual_stages_of_each, config.virtual_stages_of_each
    if len(model) < parts:
        of_each = f" with {each} parts each" if each > 1 else ""
        raise ConfigError(
            f"stages {config.stages}{of_each}: this model has {len(model)} blocks, give at most that many"
        )
    if config.balance is not None and sum(config.balance) != len(model):
        raise ConfigError(
            f"balance {config.balance}: these are {sum(config.balance)} blocks and this model has {len(model)}, give all of them"
        )


def cut_into_stages(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
    planned: Plan | None,
) -> Pipeline:
    """The model in the configured pipeline stages, of which this rank's is on its device. Collective.

    Args:
        optimizer: of the model, without state; it keeps the parameters of this rank's stage.
        planned: gives the cuts and what each block keeps; without one they are as configured.

    Raises:
        ConfigError: the model cannot be cut so; on every rank alike.
    """
    with errors_everywhere("hvd_ckpt.train.cut"):
        if planned is not None:
            pipeline = Pipeline(model, plan=planned)  # type: ignore[arg-type]
        else:
            pipeline = Pipeline(
                model,  # type: ignore[arg-type]
                config.balance,
                chunks=config.accumulate,
                schedule=config.pipeline_schedule,
                checkpoint=config.checkpoint,
                virtual_stages=config.virtual_stages_of_each,
            )
        own = set(pipeline.parameters())
        for group in optimizer.param_groups:  # one may become empty: all stages have the same groups
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        if not any(group["params"] for group in optimizer.param_groups):
            raise ConfigError(
                f"stages {config.stages}: stage {current().stage} has no parameters that are trained, give another balance than "
                f"{pipeline.balance}"
            )
    return pipeline.to(device)


def choose_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    train: Dataset,
    objective: Objective,
    device: torch.device,
    folder: Path,
    text: str | None,
) -> tuple[Plan | None, str | None]:
    """The configured plan, written to ``plan.json``, and its text. Collective.

    Args:
        model: the whole one; the plan is not applied to it yet.
        optimizer: of the model, not distributed.
        train: its first samples are planned with.
        folder: of the run.
        text: of the run's earlier plan, if it is still valid.

    Raises:
        ConfigError: no plan stays within the budget, or the plan file cannot be read or does not fit; on every rank alike.
    """
    if config.budget is None and config.plan is None:
        return None, None
    file, first = folder / "plan.json", current().number == 0
    if text is not None:
        with errors_everywhere("hvd_ckpt.train.plan_file"):
            if first:
                write_text(text, file)
    try:
        if text is not None or config.plan is not None:
            with errors_everywhere("hvd_ckpt.train.plan"):
                chosen = load_plan(
                    file if text is not None else Path(str(config.plan)), model, config.precision
                )
                _check_layout(chosen, config)
        else:
            chosen = _make_plan(model, optimizer, config, train, objective, device)
    except ConfigError:
        if first and not config.resume:
            (folder / "config.yaml").unlink()  # the folder is empty again, and can be given again
        raise
    if first:
        chosen.save(file)
        text = file.read_text("utf-8")
    return chosen, of_first_process(text, "hvd_ckpt.train.plan_text")


@watchdog.unlimited()
def _make_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    train: Dataset,
    objective: Objective,
    device: torch.device,
) -> Plan:
    """A plan for steps of micro-batches."""
    count = min(config.micro_batch, len(train))
    with errors_everywhere("hvd_ckpt.train.sample"):
        sample = train.batch(range(count), [0] * count).to(device)
    stages: dict[str, Any] = {}
    if config.stages > 1:
        stages = {
            "stages": config.stages,
            "chunks": config.accumulate,
            "schedule": config.pipeline_schedule,
            "virtual_stages": config.virtual_stages_of_each,
            "param_scale": _param_scale(model, optimizer, config),
        }
        if current().number == 0:
            model.to(device)  # this process plans
    try:
        return plan(
            model,
            *sample.inputs,
            kwargs=sample.shared,
            loss=lambda output: objective.loss(output, sample),
            budget=config.budget,
            autocast=AUTOCAST.get(config.precision),
            chunk_head=config.chunk_head,
            verbose=True,
            cache=config.plan_cache,
            **stages,
        )
    except ValueError as error:
        raise ConfigError(f"budget {config.budget}: {error}") from None
    finally:
        if stages:
            model.to("cpu")


def _param_scale(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> float:
    """Bytes of a parameter with its gradient, optimizer state and average on each rank, for each byte of the parameter alone."""
    entries = next(iter(state_of_shards(optimizer, model).values()), {})
    kept = sum(isinstance(entry, torch.Tensor) and entry.numel() == FLAT for entry in entries.values())
    split = [kept + (config.ema is not None), 1, 1]  # over the ranks, from stage 1, 2 and 3 of ZeRO on
    return sum(
        part / hvd.size() if config.shard_stage > place else float(part) for place, part in enumerate(split)
    )


def _check_layout(made: Plan, config: Config) -> None:
    """Raises ConfigError if a plan is for other pipeline stages than configured."""
    cuts = made.pipeline
    if (cuts is None) != (config.stages == 1):
        other = "without stages" if cuts is None else f"in {cuts.stages} stages"
        raise ConfigError(
            f"plan {config.plan}: it is for a model {other}, make one with `hvd-ckpt plan --stages {config.stages}`"
        )
    if cuts is None:
        return
    for setting, wanted, given in (
        ("stages", cuts.stages, config.stages),
        ("accumulate", cuts.micro_batches, config.accumulate),
        ("pipeline_schedule", cuts.schedule, config.pipeline_schedule),
        ("virtual_stages", cuts.virtual_stages, config.virtual_stages_of_each),
    ):
        if wanted != given:
            raise ConfigError(f"{setting} {given}: the plan {config.plan} was made for {wanted}, give that")


def load_plan(file: Path, model: nn.Module, precision: str) -> Plan:
    """The plan in a file, if it fits the model and was made in this precision.

    Raises:
        ConfigError: it cannot be read or does not fit.
    """
    try:
        loaded = Plan.load(file)
        loaded.check(model)
    except PlanError as error:
        raise ConfigError(f"plan: {error}") from None
    except OSError as error:
        raise ConfigError(f"plan: cannot read '{file}': {error.strerror}") from None
    made = next(
        (name for name, dtype in AUTOCAST.items() if str(dtype) == f"torch.{loaded.autocast}"), "fp32"
    )
    if made != precision and {made, precision} & AUTOCAST.keys():
        raise ConfigError(
            f"plan '{file}': it was made for precision {made}, and this run's is {precision}, with another peak: make "
            f"one with `hvd-ckpt plan --precision {precision}`, or give budget instead"
        )
    return loaded


# ------------------------------------------------------------------------------------ optimizer


def distribute(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config, aliases: Mapping[str, str]
) -> Any:
    """The ``DistributedOptimizer`` of a run, sharded or not, or its ``LocalSGD``. Collective.

    Args:
        model: on its device and with its plan, since blocks that are recomputed together are gathered together at stage 3.
        aliases: further names of tied parameters, and the one that the optimizer knows: on each pipeline stage a parameter may have
            another.

    Raises:
        ConfigError: the job or the optimizer cannot be sharded, or there is no room for offloaded state; on every rank alike.
    """
    if not config.verify_weights:
        verify_weights(False)
    if config.is_local:
        return make_local(optimizer, model, config)
    if config.shard_stage and is_elastic():
        raise ConfigError(
            f"shard {config.shard}: ranks of an elastic job come and go, and take what they hold with them, leave it out"
        )
    options: dict[str, Any] = {}
    if config.shard_stage:
        options = {name: getattr(config, name) for name in ("shard", "offload", "offload_folder", "wire")}
        options["backward_passes_per_step"] = config.accumulate if config.accumulate_locally else 1
    if config.shard_stage == 3 or config.replicas is not None:
        options["model"] = model
    if config.shard_stage == 3:
        options["within"] = config.within
    if config.replicas is not None:
        options["replicas"] = config.replicas
    # The replicas of a stage raise together, and the stages must, too.
    with errors_everywhere("hvd_ckpt.train.distribute") if config.stages > 1 else nullcontext():
        try:
            distributed: Any = DistributedOptimizer(
                optimizer,
                named_parameters=[(aliases.get(name, name), one) for name, one in model.named_parameters()],
                compression=getattr(Compression, config.compression),
                bucket_cap_mb=config.bucket_cap_mb,
                **options,
            )
        except (ValueError, OSError) as error:
            if config.replicas is not None:
                raise ConfigError(str(error)) from None
            if not config.shard_stage:
                raise
            raise ConfigError(f"shard {config.shard}: {error}") from None
    if config.replicas is not None:
        distributed.replicas.seed = config.seed
    if is_elastic():  # where ranks have made different numbers of optimizers
        agree_on_naming(distributed)
    return distributed
