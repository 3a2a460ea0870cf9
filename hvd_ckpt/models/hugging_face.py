"""Models of Hugging Face's ``transformers`` as chains of blocks, from a configuration or from a local folder.

A folder is one that ``save_pretrained`` writes. It may come from anywhere, so nothing in it is executed: configurations are JSON
and weights safetensors, code and pickles are left alone, and nothing is downloaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ckpt.json_file import Wrong, read_json, shown
from hvd_ckpt.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hvd_ckpt.models.wrapped import WrappedChain

__all__ = ["from_config", "from_folder", "kind_of_folder"]


@dataclass(frozen=True)
class ModelType:
    """The conversion of one of the model types of ``transformers``.

    Attributes:
        model: its class there, with a language-model head.
        config: the class of its configuration there.
        module, chain: the module of this folder that has the chain, and its class.
        kind: what it learns: "masked", "permutation" or "causal".
    """

    model: str
    config: str
    module: str
    chain: str
    kind: str


MODEL_TYPES: dict[str, ModelType] = {
    "bert": ModelType("BertForMaskedLM", "BertConfig", "bert", "BertChain", "masked"),
    "roberta": ModelType("RobertaForMaskedLM", "RobertaConfig", "bert", "BertChain", "masked"),
    "xlnet": ModelType("XLNetLMHeadModel", "XLNetConfig", "xlnet", "XLNetChain", "permutation"),
    "gpt2": ModelType("GPT2LMHeadModel", "GPT2Config", "gpt2", "GPT2Chain", "causal"),
}

MOST = 1 << 24
MOST_LAYERS = 4096

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PARTS = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZER = (  # beside which a configuration still stands alone
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# Which code runs the model is for this machine to say: a name here may stand for code that would be downloaded.
CODE = ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config")


def from_config(config: PreTrainedConfig, *, checkpoint_interval: int = 0) -> WrappedChain:
    """The chain of a configuration of ``transformers``: random start, training mode.

    Raises:
        ValueError: for a model type other than bert, roberta, xlnet and gpt2, or a configuration that no chain can be made from.
    """
    model_type = _supported(config.model_type, "The configuration")
    model = getattr(import_module("transformers"), model_type.model)(config)
    return _chain(model_type, model, checkpoint_interval)


def from_folder(folder: str | os.PathLike[str], *, checkpoint_interval: int = 0) -> WrappedChain:
    """The chain of a local folder that ``save_pretrained`` wrote, in float32 and training mode.

    A folder that holds ``config.json`` and no more than files of a tokenizer gives a random start.

    Raises:
        FileNotFoundError: there is no such folder, no ``config.json`` in it, or no weights as safetensors.
        ValueError: a file is damaged, the model type is not bert, roberta, xlnet or gpt2, or the weights are another model's.
    """
    folder = Path(folder)
    options = _options(folder)
    _check_sizes(options, folder / CONFIG)
    model_type = _supported(options.pop("model_type", None), f"{folder / CONFIG}")
    random_start = not _has_weights(folder)
    transformers = import_module("transformers")
    kind = getattr(transformers, model_type.model)
    try:
        config = getattr(transformers, model_type.config).from_dict(
            {name: value for name, value in options.items() if name not in CODE and not name.startswith("_")}
        )
        model = kind(config) if random_start else None
    except Exception as error:  # whatever transformers makes of values that no configuration can have
        raise ValueError(f"{folder / CONFIG} describes no {kind.__name__}: {_one_line(error)}") from error
    if model is None:
        model = _load(kind, config, folder)
    return _chain(model_type, model, checkpoint_interval)


def kind_of_folder(folder: str | os.PathLike[str]) -> str:
    """The objective of the model of a folder: "masked", "permutation" or "causal".

    Raises:
        FileNotFoundError, ValueError: as :func:`from_folder`, of the configuration.
    """
    folder = Path(folder)
    return _supported(_options(folder).get("model_type"), f"{folder / CONFIG}").kind


def _check_sizes(options: dict[str, Any], path: Path) -> None:
    """A few digits in a file may ask for more than a machine can hold, or for layers without an end."""
    for name, value in options.items():
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _most(name):
            raise ValueError(
                f"{path} is damaged: {name} is {shown(value)}, and may be {_most(name)} at most."
            )


def _most(name: str) -> int:
    """Of a number in a configuration; what counts layers is one of a few."""
    return MOST_LAYERS if "layer" in name and "dim" not in name else MOST


def _supported(model_type: Any, where: str) -> ModelType:
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ValueError(
            f"{where} is for a model of type {shown(model_type)}: supported are {', '.join(MODEL_TYPES)}."
        )
    return MODEL_TYPES[model_type]


def _chain(model_type: ModelType, model: Any, checkpoint_interval: int) -> WrappedChain:
    kind = getattr(import_module(f"hvd_ckpt.models.{model_type.module}"), model_type.chain)
    chain: WrappedChain = kind(model.train(), checkpoint_interval)
    return chain


def _options(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}: name one that transformers' save_pretrained wrote."
        )
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}: name a folder that transformers' save_pretrained wrote."
        )
    try:
        options = read_json(path, "name a folder that save_pretrained wrote", "restore it from a copy")
    except Wrong as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(options).__name__} instead of an object.")
    return options


def _has_weights(folder: Path) -> bool:
    others = sorted(path.name for path in folder.iterdir() if path.name not in (CONFIG, *TOKENIZER))
    if ADAPTER in others:
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER}) to another model: merge them and save the whole."
        )
    if PARTS in others:
        try:
            parts = set(
                read_json(folder / PARTS, "save the model again", "save the model again")[
                    "weight_map"
                ].values()
            )
        except (Wrong, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / PARTS} is damaged: {_one_line(error)}.") from error
        for part in parts:
            if not isinstance(part, str) or part not in others or not part.endswith(".safetensors"):
                raise ValueError(
                    f"{folder / PARTS} names {part!r}, which is not a safetensors file of the folder."
                )
        return True
    if WEIGHTS in others:
        return True
    if others:
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}, only {', '.join(others[:5])}: save the model with save_pretrained, which writes "
            f"one (pickles are not loaded), or leave {CONFIG} and tokenizer files alone in the folder for a random start."
        )
    return False


def _load(kind: Any, config: Any, folder: Path) -> Any:
    import torch
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # each rank loads, and errors say the rest
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, found = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of safetensors, of JSON, of shapes: all mean the same here
        raise ValueError(f"The weights in {folder} cannot be loaded: {_one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if found["missing_keys"]:
        raise ValueError(
            f"The weights in {folder} are not those of a {kind.__name__}: {min(found['missing_keys'])} is missing."
        )
    return model


def _one_line(error: Exception) -> str:
    return one_line(" ".join(str(error).split()))
