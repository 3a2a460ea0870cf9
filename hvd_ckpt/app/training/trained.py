"""The trained model of a run, built from a snapshot without the run's data, for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hvd_ckpt.app.datasets.text import TEXTS
from hvd_ckpt.app.datasets.tokens import number_of_tokens, read_tokenizer, special_tokens
from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.training.build import find_tokenizer
from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.parallel.pipeline.chain import WrappedChain
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.utils.named import is_named
from hvd_ckpt.utils.schema import Wrong

# The names of the weights of token embeddings, of which there is one for each token.
EMBEDDINGS = (
    "embeddings.embeddings.word_embeddings.weight",
    "embeddings.tokens.weight",
    "embedding.tokens.weight",
    "embedding.0.weight",
)


class Trained(NamedTuple):
    """A run: its settings, tokens in a sample, and its tokenizer's file."""

    config: Config
    length: int
    tokenizer: Path | None


def settings_of(path: Path) -> Trained:
    """The run that wrote a snapshot.

    Raises:
        ConfigError: a loop of one's own wrote it, or its model is one that the catalogue does not make or not of text.
        SnapshotError: it is damaged.
    """
    state = open_snapshot(path).replicated
    if not isinstance(state, dict) or "config" not in state:
        raise ConfigError(
            f"'{path}' was written by a loop of your own, so the model is not known: export its weights with --format "
            "safetensors or pt, and load them into your model"
        )
    config = Config.make(state["config"])
    way_out = "export its weights with --format safetensors or pt"
    if is_named(config.model):
        raise ConfigError(
            f"model {config.model}: only models of the catalogue and folders can be made for this: {way_out}"
        )
    with config_errors(about=f"model {config.model}"):
        entry = catalog.find(config.model)
    if entry.kind not in TEXTS or (config.data is not None and config.data.is_function):
        raise ConfigError(f"model {config.model}: it was not trained on text: {way_out}")
    tokenizer = find_tokenizer(config, entry.folder)
    return Trained(config, config.sequence_length or entry.data.get("length", 128), tokenizer)


def write_hf(run: Trained, path: Path, weights: dict[str, Tensor]) -> None:
    """Writes a folder for transformers' ``from_pretrained``: configuration, weights, and the tokenizer of the run.

    Raises:
        ConfigError: the weights are not of the run's model.
        Wrong: the model is not one of transformers.
    """
    with config_errors(RuntimeError, about=f"model {run.config.model}"):
        embeddings = next((weights[name] for name in EMBEDDINGS if name in weights), None)
        if embeddings is None or embeddings.dim() != 2:
            raise ValueError("the snapshot has no token embeddings of such a model")
        facts = {"vocabulary": len(embeddings), "length": run.length}
        model = catalog.find(run.config.model).build(facts, run.config.model_options)
        model.load_state_dict(weights)
    if not isinstance(model, WrappedChain):
        raise Wrong(
            f"the model {run.config.model} is not one of transformers: give --format safetensors or pt"
        )
    model.eval().transformers_model.save_pretrained(path)
    if run.tokenizer is None and run.config.data is not None and run.config.data.kind == "tokens":
        # Nothing tells what the ids stand for, so the folder has no tokenizer.
        return
    from transformers import PreTrainedTokenizerFast

    tokenizer, special = _tokenizer_of(run)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=run.length, clean_up_tokenization_spaces=False, **special
    ).save_pretrained(path)


def _tokenizer_of(run: Trained) -> tuple[Any, dict[str, str]]:
    """The tokenizer, also for bytes, and its special tokens by transformers' names; those that it lacks have numbers above its own,
    as in :class:`hvd_ckpt.app.datasets.tokens.Tokens`."""
    tokenizer = _byte_tokenizer() if run.tokenizer is None else read_tokenizer(run.tokenizer)[0]
    theirs = {"mask": "mask_token", "padding": "pad_token", "start": "cls_token", "separator": "sep_token"}
    special = special_tokens(tokenizer, number_of_tokens(tokenizer, run.tokenizer or ""))
    for token, number in special.values():
        if tokenizer.token_to_id(token) is None:
            tokenizer.add_special_tokens([token])
        # The tokens had these numbers in training, so a tokenizer that would give others cannot be written.
        if tokenizer.token_to_id(token) != number:
            raise Wrong(f"the tokenizer '{run.tokenizer}' has gaps in its numbers: add {token} to it")
    return tokenizer, {theirs[kind]: token for kind, (token, _) in special.items()}


def _byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8 text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
