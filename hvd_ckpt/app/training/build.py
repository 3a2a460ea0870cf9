"""Data and model of a run, built from its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.app.datasets.images import open_images
from hvd_ckpt.app.datasets.shards import Shards
from hvd_ckpt.app.datasets.text import TEXTS
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.datasets.volumes import open_volumes
from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.functions import objective_of, open_data
from hvd_ckpt.app.training.model import convert_batch_norms
from hvd_ckpt.app.training.optim import freeze
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.offload.host_memory import init_on_disk
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.utils.measure import undisturbed
from hvd_ckpt.utils.named import import_named, is_named
from hvd_ckpt.utils.schema import shown
from hvd_ckpt.utils.text import DOCUMENTS

CPU = torch.device("cpu")
# Kinds of data to which a setting applies.
SETTINGS_OF_DATA = {
    "tokenizer": TEXTS,
    "sequence_length": TEXTS,
    "pixels": ("images", "volumes"),
}


class Assembly(NamedTuple):
    """The arguments of a trainer.

    Attributes:
        model: with random weights drawn from the configuration's seed, or those of its folder.
        train, test: samples; ``test`` is None where no validation split is configured.
    """

    model: nn.Module
    objective: Objective
    train: Dataset
    test: Dataset | None


# ------------------------------------------------------------------------------------ data and model


def assemble(config: Config, device: torch.device = CPU) -> Assembly:
    """Data and model of a configuration, the same on every rank.

    Args:
        device: where the model is made; on ``meta`` it takes no memory.

    Raises:
        ConfigError: the model is unknown, has no such option, or does not fit the data; data cannot be read.
    """
    data, kind = config.data, ""
    given = data is not None and data.is_function
    if is_named(config.model):  # whose kind of data is that of the setting
        if data is None:
            raise ConfigError(
                f"model {config.model}: give data: a function that returns samples, or text, tokens, images or volumes"
            )
        kind = "causal" if data.is_text else data.kind
    with config_errors(OSError):
        entry = catalog.find(config.model, kind)
        entry.check_options(config.model_options)
        _check_settings(config, "function" if given else entry.kind)
        train, test, facts = open_data(config) if given else _open_data(config, entry)
        objective = objective_of(config, entry.kind)
    for name, value in config.model_options.items():
        if name in facts and isinstance(value, int) and value < facts[name]:
            raise ConfigError(
                f"model_options: {name}={value}, and the data have {facts[name]}: give at least that"
            )
    # The weights follow from the configuration, whatever has been drawn before.
    torch.manual_seed(config.seed)
    place: Any = torch.device("meta") if device.type == "meta" else contextlib.nullcontext()
    if config.shard.offload == "parameters":
        place = init_on_disk(config.shard.folder)
    sizes = (RuntimeError, MemoryError, OverflowError)  # that no machine has
    with config_errors(*sizes, about=f"model {config.model}"), place:
        model = entry.build(facts, config.model_options)
    if entry.folder is not None:
        _check_limits(config, model, facts)
    return Assembly(model, objective, train, test)


@watchdog.unlimited()
def assemble_in_turn(config: Config) -> Assembly:
    """:func:`assemble` on all ranks: the first of each machine encodes the text, the others find its tokens. Collective.

    Raises:
        ConfigError: raised on every rank.
    """
    # The first rank of a machine writes its tokens to a file, which the others then find. Both turns are collective.
    for turn in (True, False):
        with errors_everywhere("hvd_ckpt.train.assembly"):
            if turn == (current().local_rank == 0):
                assembly = assemble(config)
    return assembly


def _open_data(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Samples to train and to evaluate on, and the facts of the data that the model depends on."""
    if entry.kind in TEXTS:
        return _open_text(config, entry)
    data = None if config.data is None else config.data.path
    pixels = config.pixels or entry.data.get("pixels", 32)
    samples = (open_images if entry.kind == "images" else open_volumes)(data, pixels, seed=config.seed)
    return *samples.split(config.validation_split), {"channels": samples.channels, "classes": samples.classes}


def _open_text(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    tokenizer, data = find_tokenizer(config, entry.folder), config.data
    of_ids = data is not None and data.kind == "tokens"
    if data is None:
        tokens = Tokens(None, tokenizer)
    elif of_ids:
        tokens = Shards(data.path, tokenizer, data.vocabulary, token_type=data.type)
    else:
        tokens = Tokens(data.path, tokenizer, documents=data.kind if data.kind in DOCUMENTS else None)
    length = config.sequence_length or entry.data.get("length", 128)
    train, test = TEXTS[entry.kind](tokens, length, seed=config.seed).split(config.validation_split)
    vocabulary = tokens.vocabulary
    if entry.folder is not None or of_ids:  # special tokens that are not used need no place
        special = [tokens.separator] * (not of_ids) + [tokens.mask] * (entry.kind == "masked")
        vocabulary = max([tokens.ordinary - 1, *special]) + 1
    return train, test, {"vocabulary": vocabulary, "length": length}


def find_tokenizer(config: Config, folder: Path | None) -> Path | None:
    """The file of the run's tokenizer: as configured, else beside the token ids, else in the folder of the model; None for bytes,
    or for token ids without one."""
    if config.tokenizer is not None:
        return Path(config.tokenizer)
    data = config.data
    places = [Path(data.path), Path(data.path).parent] if data is not None and data.kind == "tokens" else []
    places += [] if folder is None else [folder]
    return next((file for place in places if (file := place / "tokenizer.json").is_file()), None)


def _check_settings(config: Config, kind: str) -> None:
    """A setting without effect on this kind of data is more likely a mistake than meant."""
    data = config.data
    fits = data is None or (kind in TEXTS if data.is_text else data.kind == kind)
    kinds_of = {**SETTINGS_OF_DATA, **({} if fits else {"data": ()})}
    for name, kinds in kinds_of.items():
        if getattr(config, name) is not None and kind not in kinds:
            what = str(config.data) if kind == "function" else "text" if kind in TEXTS else kind
            raise ConfigError(
                f"{name} {getattr(config, name)}: the model {config.model} is trained on {what}, leave it out"
            )


def _check_limits(config: Config, model: nn.Module, facts: dict[str, Any]) -> None:
    """The sizes of a folder's model are fixed; the data has to fit."""
    vocabulary, length = catalog.limits(model)
    if facts["vocabulary"] > vocabulary:
        raise ConfigError(
            f"model {config.model}: it knows the tokens below {vocabulary}, and the text has tokens up to "
            f"{facts['vocabulary'] - 1}: give the model's own tokenizer"
        )
    if length is not None and facts["length"] > length:
        raise ConfigError(
            f"sequence_length {facts['length']}: the model {config.model} takes at most {length} tokens"
        )


# ------------------------------------------------------------------------------------ a step without training


def sample_of(data: Dataset, numbers: Sequence[int], objective: Objective, device: torch.device) -> Sample:
    """The samples with these numbers as a batch whose step is measured."""
    batch = data.batch(numbers, [0] * len(numbers)).to(device)
    return Sample(batch.inputs, batch.shared, lambda output: objective.loss(output, batch))


def first_step(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[int], Sample]]:
    """The model of a run, in training mode, and a function that makes a batch of so many samples, both on a device.

    The samples are those of the run. Without ``data``, a model ``module:function`` has its own: the function returns (model, tuple
    of its arguments, loss or None), for a number of samples if it takes ``batch``.

    Args:
        device: on ``meta``, no memory is taken.

    Raises:
        ConfigError: as of :func:`assemble`, or the function returns something else, or ``freeze`` or
            ``batch_norm`` do not fit the model.
    """
    if is_named(config.model) and config.data is None:
        model, sample = _returned(config, device)
    else:
        whole, objective, train, _ = assemble(config, device)

        def of_run(count: int) -> Sample:
            return sample_of(train, [number % len(train) for number in range(count)], objective, device)

        model, sample = whole.to(device), of_run
    with config_errors():
        if config.freeze is not None:
            freeze(model, config.freeze)
        return convert_batch_norms(model, config), sample


def _returned(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[int], Sample]]:
    with config_errors():
        entry = catalog.find(config.model)
        entry.check_options(config.model_options)
        entry.check_arguments({"batch", *config.model_options})

    def call(count: int) -> tuple[nn.Module, Sample]:
        torch.manual_seed(config.seed)
        sizes = {"batch": count} if "batch" in entry.options else {}
        match import_named("model", config.model)(**{**sizes, **config.model_options}):
            case (nn.Module() as model, tuple() as args, loss) if loss is None or callable(loss):
                args = map_tensors(lambda tensor: tensor.to(device), torch.Tensor, args)
                return model.to(device), Sample(args, {}, loss)
            case other:
                raise ConfigError(
                    f"model {config.model}: it returned {type(other).__name__}, and must return (model, tuple of sample arguments, "
                    "loss or None), or give data"
                )

    return call(1)[0], lambda count: call(count)[1]


def check_functions(config: Config, parts: Assembly) -> None:
    """Runs model, loss and metrics on one micro-batch, so that what does not fit is found before anything is trained: functions of
    the user's own, and models of images and volumes, which may halve these to nothing.

    Raises:
        ValueError: model, loss or metrics cannot take it, or return something else than they must.
    """
    model, objective, train, _ = parts
    given = config.data is not None and config.data.is_function
    has_functions = given or is_named(config.model) or config.loss or config.metrics
    if not has_functions and not hasattr(train, "channels"):
        return
    device = next(model.parameters()).device  # in stages the whole model is on the CPU still
    count = min(config.batch // config.accumulate, len(train))  # of the smallest micro-batch
    batch = train.batch(range(count), [0] * count).to(device)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs if isinstance(tensor, Tensor))
    with torch.no_grad(), undisturbed(model, device):
        model.train()
        try:
            with _explained(f"the model {config.model} cannot take micro-batches of shape {shapes}"):
                output = model(*batch.inputs, **batch.shared)
            with _explained(f"loss {config.loss}: it cannot take the model's output and the targets"):
                loss = objective.loss(output, batch)
            with _explained("metrics: they cannot take the model's output and the targets"):
                metrics = objective.metrics(output, batch)
            returned = {
                f"loss {config.loss}: it": loss,
                **{f"metrics: {name}": each for name, each in metrics.items()},
            }
            for what, value in returned.items():
                if not isinstance(value, Tensor) or value.numel() != 1:
                    said = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
                    raise ValueError(
                        f"{what} returned {said}, and must return a tensor of one element, the mean over the samples"
                    )
        finally:
            model.train()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: {type(error).__name__}: {reason}") from error
