"""The parts of a run, built from its configuration: data, model, device, precision, recomputation, distributed optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import global_process_set
from torch import nn

from hvd_ckpt import watchdog
from hvd_ckpt.batchnorm import DeferredBatchNorm, SyncBatchNorm
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.images import open_images
from hvd_ckpt.data.text import CausalText, MaskedText, PermutedText
from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.data.volumes import open_volumes
from hvd_ckpt.distributed import DistributedOptimizer
from hvd_ckpt.json_file import write_text
from hvd_ckpt.measure import undisturbed
from hvd_ckpt.models import catalog
from hvd_ckpt.models.chain import Chain
from hvd_ckpt.models.objectives import OBJECTIVES, Objective
from hvd_ckpt.planning.budget import BudgetError
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.planner import plan
from hvd_ckpt.precision import Precision
from hvd_ckpt.recompute import CheckpointSequential
from hvd_ckpt.reduction import Compression
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.torch_private import AnyBatchNorm
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.failures import errors_everywhere

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TEXTS: dict[str, Any] = {"causal": CausalText, "masked": MaskedText, "permutation": PermutedText}
# Kinds of data to which a setting applies.
SETTINGS_OF_DATA = {
    "text": TEXTS,
    "tokenizer": TEXTS,
    "sequence_length": TEXTS,
    "images": ("images",),
    "volumes": ("volumes",),
    "pixels": ("images", "volumes"),
}


class Assembly(NamedTuple):
    """The arguments of a trainer.

    Attributes:
        model: with random weights drawn from the configuration's seed, or those of its folder.
        objective: its loss.
        train, test: samples; ``test`` is None where no validation split is configured.
    """

    model: nn.Module
    objective: Objective
    train: Dataset
    test: Dataset | None


# ------------------------------------------------------------------------------------ data and model


def assemble(config: Config) -> Assembly:
    """Data and model of a configuration, the same on every rank.

    Raises:
        ConfigError: the model is unknown, has no such option, or does not fit the data; data cannot be read.
    """
    try:
        entry = catalog.find(config.model)
        entry.check_options(config.model_options)
        _check_settings(config, entry.kind)
        train, test, facts = _open_data(config, entry)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    torch.manual_seed(config.seed)
    try:
        model = entry.build(facts, config.model_options)
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:  # sizes that no machine has
        raise ConfigError(f"model {config.model}: {' '.join(str(error).split())}") from None
    if entry.folder is not None:
        _check_limits(config, catalog.limits(model), facts)
    if entry.kind in SETTINGS_OF_DATA["pixels"]:
        _check_pixels(config, model, train)
    return Assembly(model, OBJECTIVES[entry.kind](), train, test)


@watchdog.unlimited()
def assemble_in_turn(config: Config) -> Assembly:
    """:func:`assemble` on all ranks: the first of each machine encodes the text, the others find its tokens. Collective.

    Raises:
        ConfigError: on every rank alike.
    """
    for turn in (True, False):
        with errors_everywhere("hvd_ckpt.train.assembly"):
            if turn == (hvd.local_rank() == 0):
                assembly = assemble(config)
    return assembly


def _open_data(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Samples to train and to evaluate on, and the facts of the data that the model depends on."""
    if entry.kind in TEXTS:
        return _open_text(config, entry)
    pixels = config.pixels or entry.data["pixels"]
    if entry.kind == "images":
        images = open_images(config.images, pixels, seed=config.seed)
        return *images.split(config.validation_split), {
            "channels": images.channels,
            "classes": images.classes,
        }
    volumes = open_volumes(config.volumes, pixels, seed=config.seed)
    return *volumes.split(config.validation_split), {"channels": volumes.channels, "classes": volumes.classes}


def _open_text(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    tokenizer = config.tokenizer
    if tokenizer is None and entry.folder is not None and (entry.folder / "tokenizer.json").is_file():
        tokenizer = str(entry.folder / "tokenizer.json")
    tokens = Tokens(config.text, tokenizer)
    length = config.sequence_length or entry.data["length"]
    train, test = TEXTS[entry.kind](tokens, length, seed=config.seed).split(config.validation_split)
    vocabulary = tokens.vocabulary
    if entry.folder is not None:  # whose vocabulary need not have the special tokens that are not used here
        special = [tokens.separator] + [tokens.mask] * (entry.kind == "masked")
        vocabulary = max(tokens.ordinary - 1, *special) + 1
    return train, test, {"vocabulary": vocabulary, "length": length}


def _check_settings(config: Config, kind: str) -> None:
    """A setting without effect on this kind of data is more likely a mistake than meant."""
    for name, kinds in SETTINGS_OF_DATA.items():
        if getattr(config, name) is not None and kind not in kinds:
            what = "text" if kind in TEXTS else kind
            raise ConfigError(
                f"{name} {getattr(config, name)}: the model {config.model} is trained on {what}, leave it out"
            )


def _check_limits(config: Config, limits: catalog.Limits, facts: dict[str, Any]) -> None:
    """The sizes of a folder's model are fixed; the data has to fit."""
    if facts["vocabulary"] > limits.vocabulary:
        raise ConfigError(
            f"model {config.model}: it knows the tokens below {limits.vocabulary}, and the text has tokens up to "
            f"{facts['vocabulary'] - 1}: give the model's own tokenizer"
        )
    if limits.length is not None and facts["length"] > limits.length:
        raise ConfigError(
            f"sequence_length {facts['length']}: the model {config.model} takes at most {limits.length} tokens"
        )


def _check_pixels(config: Config, model: nn.Module, train: Dataset) -> None:
    """Runs the model on a smallest micro-batch: it may halve its input to nothing, and a batch norm cannot train on one value."""
    count = min(config.batch // config.accumulate, len(train))
    sample = train.batch(range(count), [0] * count)
    training = config.batch_norm != "synchronized"  # that trains on the samples of all ranks
    try:
        with torch.no_grad(), undisturbed(model, torch.device("cpu")):
            model.train(training)(*sample.inputs)
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        shape = tuple(sample.inputs[0].shape)
        raise ConfigError(
            f"pixels: the model {config.model} cannot take micro-batches of shape {shape}: {reason}"
        ) from None
    finally:
        model.train()


# ------------------------------------------------------------------------------------ device and precision


def device_of(config: Config) -> torch.device:
    """The configured device: by default the GPU with this rank's number on its machine, or the CPU where there is none.

    Raises:
        ConfigError: it does not exist, or is neither a CPU nor a CUDA device.
    """
    name = config.device
    if name is None:
        name = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N")
    if device.type == "cuda":
        number = hvd.local_rank() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise ConfigError(f"device '{name}': there is no such device here, see `hvd-ckpt doctor`")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


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

    Raises:
        ConfigError: it has no batch norm, is not a chain, or has fewer blocks than segments.
    """
    model, kind = model.to(device), type(model).__name__
    if config.batch_norm != "local":
        if not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
            raise ConfigError(f"batch_norm {config.batch_norm}: this {kind} has no batch norm, leave it out")
        converter: Any = SyncBatchNorm if config.batch_norm == "synchronized" else DeferredBatchNorm
        model = converter.convert(model)
    if config.segments is None:
        return model
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f"segments {config.segments}: this {kind} is not a chain of blocks, give a budget")
    if config.segments > len(model):
        raise ConfigError(
            f"segments {config.segments}: this model has {len(model)} blocks, give at most that many"
        )
    if isinstance(model, Chain):
        model.checkpoint_interval = -(-len(model) // config.segments)
        model.use_reentrant = config.reentrant
        return model
    return CheckpointSequential(model, config.segments, config.reentrant)


def apply_plan(
    model: nn.Module,
    config: Config,
    train: Dataset,
    objective: Objective,
    device: torch.device,
    folder: Path,
    text: str | None,
) -> tuple[Plan | None, str | None]:
    """The configured plan, applied to the model and written to ``plan.json``, and its text. Collective.

    Args:
        train: its first samples are planned with.
        folder: of the run.
        text: of the run's earlier plan, if it is still valid.

    Raises:
        ConfigError: no plan stays within the budget, or the plan file cannot be read or does not fit.
    """
    if config.budget is None and config.plan is None:
        return None, None
    file = folder / "plan.json"
    if text is not None and hvd.rank() == 0:
        write_text(text, file)
    if text is not None or config.plan is not None:
        hvd.barrier()
        with errors_everywhere("hvd_ckpt.train.plan"):
            made = load_plan(file if text is not None else Path(str(config.plan)), model, config.precision)
    else:
        made = _make_plan(model, config, train, objective, device)
    if hvd.rank() == 0:
        made.save(file)
        text = file.read_text("utf-8")
    made.apply(model)
    return made, broadcast_from(text, 0, global_process_set, "hvd_ckpt.train.plan_text")


@watchdog.unlimited()
def _make_plan(
    model: nn.Module, config: Config, train: Dataset, objective: Objective, device: torch.device
) -> Plan:
    """A plan for steps of micro-batches."""
    count = min(config.micro_batch, len(train))
    with errors_everywhere("hvd_ckpt.train.sample"):
        sample = train.batch(range(count), [0] * count).to(device)
    try:
        return plan(
            model,
            *sample.inputs,
            kwargs=sample.shared,
            loss=lambda output: objective.loss(output, sample),
            budget=config.budget,
            autocast=AUTOCAST.get(config.precision),
            verbose=True,
        )
    except BudgetError as error:
        raise ConfigError(f"budget {config.budget}: {error}") from None


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


def distribute(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> Any:
    """The ``DistributedOptimizer`` of a run, sharded or not. Collective.

    Args:
        model: on its device and with its plan, since blocks that are recomputed together are gathered together at stage 3.

    Raises:
        ConfigError: the job or the optimizer cannot be sharded, or there is no room for offloaded state; on every rank alike.
    """
    if config.stage and is_elastic():
        raise ConfigError(
            f"shard {config.shard}: ranks of an elastic job come and go, and take what they hold with them, leave it out"
        )
    options: dict[str, Any] = {}
    if config.stage:
        options = {name: getattr(config, name) for name in ("shard", "offload", "offload_folder", "wire")}
        options["backward_passes_per_step"] = config.accumulate if config.accumulate_locally else 1
    if config.stage == 3:
        options["model"] = model
    try:
        distributed: Any = DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(Compression, config.compression),
            bucket_cap_mb=config.bucket_cap_mb,
            **options,
        )
    except (ValueError, OSError) as error:
        if not config.stage:
            raise
        raise ConfigError(f"shard {config.shard}: {error}") from None
    if is_elastic():  # where ranks have made different numbers of optimizers
        distributed.agree_on_naming()
    return distributed
