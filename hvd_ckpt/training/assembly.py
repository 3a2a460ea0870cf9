"""From a configuration to what is trained: data sets, model, objective."""

from __future__ import annotations

from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt import stall
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.measure import undisturbed
from hvd_ckpt.models import catalog
from hvd_ckpt.models.objectives import OBJECTIVES, Objective
from hvd_ckpt.training.agreement import errors_everywhere
from hvd_ckpt.training.config import Config, ConfigError

__all__ = ["Assembly", "assemble", "assemble_in_turn"]


class Assembly(NamedTuple):
    """What a trainer takes.

    Attributes:
        model: with random weights drawn from the configuration's seed, or those of its folder.
        objective: its loss.
        train, test: samples; ``test`` is None where nothing is held out.
    """

    model: nn.Module
    objective: Objective
    train: Dataset
    test: Dataset | None


def assemble(config: Config) -> Assembly:
    """Builds data and model of a configuration, the same on every rank.

    Raises:
        ConfigError: the model is unknown, has no such option, or does not fit the data; data cannot be read.
    """
    try:
        entry = catalog.find(config.model)
        entry.check_options(config.model_options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_data_settings(config, entry.kind)
    try:
        train, test, facts = _DATA[entry.kind](config, entry)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    torch.manual_seed(config.seed)
    try:
        model = entry.build(facts, config.model_options)
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:  # sizes no machine has
        reason = " ".join(str(error).split())
        raise ConfigError(f"model {config.model}: {reason}") from None
    if entry.folder is not None:
        _check_limits(config, catalog.limits(model), facts)
    if entry.kind in _SETTINGS_OF_DATA["pixels"]:
        _check_pixels(config, model, train)
    return Assembly(model, OBJECTIVES[entry.kind](), train, test)


@stall.unlimited()
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


def _check_pixels(config: Config, model: nn.Module, train: Dataset) -> None:
    """Runs the model on a smallest micro-batch, without a trace: what halves its input again and again may come to nothing, and a
    batch norm cannot train on one value."""
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


_SETTINGS_OF_DATA = {
    "text": ("causal", "masked", "permutation"),
    "tokenizer": ("causal", "masked", "permutation"),
    "length": ("causal", "masked", "permutation"),
    "images": ("images",),
    "volumes": ("volumes",),
    "pixels": ("images", "volumes"),
}


def _check_data_settings(config: Config, kind: str) -> None:
    """A setting that says nothing for this kind of data is more likely a mistake than meant."""
    for name, kinds in _SETTINGS_OF_DATA.items():
        if getattr(config, name) not in (None, False) and kind not in kinds:
            what = "text" if kind in _SETTINGS_OF_DATA["text"] else kind
            raise ConfigError(
                f"{name} {getattr(config, name)}: the model {config.model} is trained on {what}, leave it out"
            )


def _check_limits(config: Config, limits: catalog.Limits, facts: dict[str, Any]) -> None:
    """The sizes of a folder's model are what they are; the data has to fit."""
    if facts["vocabulary"] > limits.vocabulary:
        raise ConfigError(
            f"model {config.model}: it knows the tokens below {limits.vocabulary}, and the text has tokens up to "
            f"{facts['vocabulary'] - 1}: give the model's own tokenizer"
        )
    if limits.length is not None and facts["length"] > limits.length:
        raise ConfigError(
            f"length {facts['length']}: the model {config.model} takes {limits.length} tokens at most, give --length"
        )


def _text(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    from hvd_ckpt.data.text import CausalText, MaskedText, PermutedText
    from hvd_ckpt.data.tokens import Tokens

    tokenizer = config.tokenizer
    if tokenizer is None and entry.folder is not None and (entry.folder / "tokenizer.json").is_file():
        tokenizer = str(entry.folder / "tokenizer.json")
    tokens = Tokens(config.text, tokenizer)
    length = config.length or entry.data["length"]
    kinds: dict[str, Any] = {"causal": CausalText, "masked": MaskedText, "permutation": PermutedText}
    data = kinds[entry.kind](tokens, length, seed=config.seed)
    train, test = data.split(config.held_out)
    if entry.folder is not None:  # whose vocabulary need not have the special tokens that nothing here uses
        special = [tokens.separator] + [tokens.mask] * (entry.kind == "masked")
        return train, test, {"vocabulary": max(tokens.ordinary - 1, *special) + 1, "length": length}
    return train, test, {"vocabulary": tokens.vocabulary, "length": length}


def _images(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    from hvd_ckpt.data.images import open_images

    data = open_images(config.images, config.pixels or entry.data["pixels"], seed=config.seed)
    train, test = data.split(config.held_out)
    return train, test, {"channels": data.channels, "classes": data.classes}


def _volumes(config: Config, entry: catalog.Entry) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    from hvd_ckpt.data.volumes import open_volumes

    data = open_volumes(config.volumes, config.pixels or entry.data["pixels"], seed=config.seed)
    train, test = data.split(config.held_out)
    return train, test, {"channels": data.channels, "classes": data.classes}


_DATA = {"causal": _text, "masked": _text, "permutation": _text, "images": _images, "volumes": _volumes}
