"""Models of Hugging Face's ``transformers`` as chains of blocks, from a local folder.

``save_pretrained`` writes such a folder. It may come from anywhere, so nothing in it is executed: configurations are JSON, weights
are safetensors, code and pickles are not loaded, and nothing is downloaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ckpt.utils.plain_data import read_json
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.text import one_line

if TYPE_CHECKING:
    from hvd_ckpt.parallel.pipeline.chain import WrappedChain

# The class in transformers with a language-model head, the module and class of its chain, and its objective.
MODEL_TYPES = {
    "bert": ("BertForMaskedLM", "transformer", "TransformerChain", "masked"),
    "roberta": ("RobertaForMaskedLM", "transformer", "TransformerChain", "masked"),
    "xlnet": ("XLNetLMHeadModel", "xlnet", "XLNetChain", "permutation"),
    "gpt2": ("GPT2LMHeadModel", "transformer", "TransformerChain", "causal"),
}
MOST, MOST_LAYERS = 1 << 24, 1 << 12  # of sizes: a few digits could require more than a machine has
CONFIG, WEIGHTS, PARTS = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = {  # files that a folder without weights may have beside its configuration
    "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
}  # fmt: skip
# Keys that choose the code of the model, which could be downloaded. They are ignored: this machine decides about code.
CODE = ("auto_map", "attn_implementation", "quantization_config")


def from_folder(folder: str | os.PathLike[str], *, checkpoint_interval: int = 0) -> WrappedChain:
    """The chain of a local folder that ``save_pretrained`` wrote, in float32 and training mode.

    For a folder with ``config.json`` and at most the files of a tokenizer, the weights are random.

    Raises:
        FileNotFoundError: the folder, its ``config.json`` or safetensors weights are missing.
        ValueError: a file is damaged, the model type is not bert, roberta, xlnet or gpt2, or the weights belong to another model.
    """
    folder = Path(folder)
    options, (model_class, module, chain_class, _) = _read_config(folder)
    for name, value in options.items():
        most = MOST_LAYERS if "layer" in name and "dim" not in name else MOST
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(
                f"{folder / CONFIG} is damaged: {name} is {shown(value)}, and may be {most} at most."
            )
    kind: Any = getattr(import_module("transformers"), model_class)
    chain: Any = getattr(import_module(f"hvd_ckpt.app.models.{module}"), chain_class)
    left_out = ("model_type", *CODE)
    options = {
        name: value for name, value in options.items() if name not in left_out and not name.startswith("_")
    }
    has_weights = _has_weights(folder)
    try:
        config = kind.config_class.from_dict(options)
        model = _load(kind, config, folder) if has_weights else kind(config)
    except Exception as error:  # of safetensors, JSON, values or shapes: all mean that the folder is invalid
        reason = one_line(" ".join(str(error).split()))
        raise ValueError(f"{folder} cannot be loaded as a {kind.__name__}: {reason}") from error
    return chain(model.train(), checkpoint_interval)


def kind_of_folder(folder: str | os.PathLike[str]) -> str:
    """The objective of the model in a folder: "masked", "permutation" or "causal".

    Raises:
        FileNotFoundError, ValueError: as in :func:`from_folder`, for the configuration.
    """
    return _read_config(Path(folder))[1][-1]


def _read_config(folder: Path) -> tuple[dict[str, Any], tuple[str, str, str, str]]:
    """The configuration in a folder, and its entry of :data:`MODEL_TYPES`."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}: name a folder that transformers' save_pretrained wrote."
        )
    options = _read(path)
    if not isinstance(options, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(options).__name__} instead of an object.")
    model_type = options.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ValueError(
            f"{path} is for a model of type {shown(model_type)}: supported are {', '.join(MODEL_TYPES)}."
        )
    return options, MODEL_TYPES[model_type]


def _read(path: Path) -> Any:
    try:
        return read_json(path, "name a folder that save_pretrained wrote", "restore it from a copy")
    except Wrong as error:
        raise ValueError(f"{path} is damaged: {error}.") from error


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights. If not, it must have no files other than those of a tokenizer."""
    others = sorted({path.name for path in folder.iterdir()} - {CONFIG, *TOKENIZER})
    if "adapter_config.json" in others:
        raise ValueError(f"{folder} holds an adapter to another model: merge them and save the whole.")
    if PARTS in others:
        parts = _read(folder / PARTS)
        names = parts.get("weight_map") if isinstance(parts, dict) else None
        if not isinstance(names, dict):
            raise ValueError(f"{folder / PARTS} is damaged: it has no weight_map.")
        for part in names.values():
            if part not in others or not part.endswith(".safetensors"):
                raise ValueError(
                    f"{folder / PARTS} names {part!r}, which is not a safetensors file of the folder."
                )
    elif others and WEIGHTS not in others:
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}, only {', '.join(others[:5])}: save the model with save_pretrained, which writes "
            f"one (pickles are not loaded), or leave {CONFIG} and tokenizer files alone in the folder for a random start."
        )
    return bool(others)


def _load(kind: Any, config: Any, folder: Path) -> Any:
    import torch
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # each rank loads the model, and errors tell what matters
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    if report["missing_keys"]:
        raise ValueError(f"{min(report['missing_keys'])} is missing in its weights.")
    return model
