"""Folders of Hugging Face models: there and back, damaged ones, and training on what a model's vocabulary holds."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from random_text import random_step
from same import assert_same, gradients
from torch import nn

from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.models.hugging_face import from_folder, kind_of_folder
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError

SIZES = {"width": 16, "heads": 2, "layers": 3, "dropout": 0.0}
LENGTH, VOCABULARY = 16, 50


def save(folder: Path, kind: str, vocabulary: int = VOCABULARY) -> str:
    model = catalog.find(f"{kind}-tiny").build({"vocabulary": vocabulary, "length": LENGTH}, SIZES)
    model.transformers_model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "name, kind, longest",
    [
        ("bert", "masked", LENGTH),
        ("roberta", "masked", LENGTH),
        ("gpt2", "causal", LENGTH),
        ("xlnet", "permutation", None),
    ],
)
def test_there_and_back_through_a_folder(tmp_path: Path, name: str, kind: str, longest: int | None) -> None:
    chain, args, kwargs, loss_of = random_step(f"{name}-tiny", 3, LENGTH, VOCABULARY, SIZES)

    def step(model: nn.Module) -> list[Any]:
        model.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        return [loss.detach(), *gradients(model)]

    step(chain)
    torch.optim.SGD(chain.parameters(), lr=0.1).step()  # the trained weights are those that are saved
    chain.transformers_model.save_pretrained(tmp_path)
    entry = catalog.find(str(tmp_path))
    assert (entry.kind, entry.folder, entry.options) == (kind, tmp_path, ("checkpoint_interval",))
    assert kind_of_folder(tmp_path) == kind
    back = entry.build({"vocabulary": 9, "length": 9}, {"checkpoint_interval": 2})
    assert type(back) is type(chain) and back.training and back.checkpoint_interval == 2
    assert catalog.limits(back) == (VOCABULARY, longest)
    assert len(list(back.parameters())) == len(list(chain.parameters()))  # weights are tied alike
    assert_same(dict(back.state_dict()), dict(chain.state_dict()))
    assert_same(step(back), step(chain))
    chain.transformers_model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert_same(dict(from_folder(tmp_path / "parts").state_dict()), dict(chain.state_dict()))
    copied = copy.deepcopy(chain)
    parameters, own = (
        {id(one) for one in module.parameters()} for module in (copied, copied.transformers_model)
    )
    assert parameters == own and copied.transformers_model is not chain.transformers_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tmp_path_factory.mktemp("saved"), "bert"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def point_to(folder: Path, name: str) -> None:
    (folder / "weights.bin").touch()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (shutil.rmtree, FileNotFoundError, "changed"),
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), ValueError, "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "config.json"),
        (lambda folder: change_config(folder, model_type="llama"), ValueError, '"llama": .* bert, roberta'),
        (lambda folder: change_config(folder, model_type=None), ValueError, "null"),
        (lambda folder: change_config(folder, hidden_size="wide"), ValueError, "BertForMaskedLM"),
        (lambda folder: change_config(folder, num_hidden_layers=1 << 20), ValueError, "num_hidden_layers"),
        (lambda folder: change_config(folder, hidden_size=32), ValueError, "BertForMaskedLM"),
        (lambda folder: change_config(folder, num_hidden_layers=4), ValueError, "encoder.layer.3.*"),
        (truncate_weights, ValueError, "BertForMaskedLM"),
        (lambda folder: point_to(folder, "weights.bin"), ValueError, "'weights.bin'"),
        (lambda folder: point_to(folder, "../x.safetensors"), ValueError, "x.safetensors'"),
        (lambda folder: (folder / "adapter_config.json").touch(), ValueError, "adapter"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            FileNotFoundError,
            "no model.safetensors, only pytorch_model.bin",
        ),
    ],
)
def test_folder_that_cannot_be_loaded(saved, tmp_path, change, error, message) -> None:
    folder = shutil.copytree(saved, tmp_path / "changed")
    change(folder)
    with pytest.raises(error, match=message) as caught:
        from_folder(folder)
    assert "\n" not in str(caught.value)


def test_folder_with_a_configuration_alone_starts_at_random(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "config.json", tmp_path)
    change_config(tmp_path, auto_map={"AutoModel": "evil.Evil"}, attn_implementation="someone/kernel")
    torch.manual_seed(0)
    chain = from_folder(tmp_path)
    assert chain.transformers_model.config._attn_implementation == "sdpa" and chain.training
    torch.manual_seed(0)
    fresh = catalog.find("bert-tiny").build({"vocabulary": VOCABULARY, "length": LENGTH}, SIZES)
    assert_same(dict(chain.state_dict()), dict(fresh.state_dict()))


def settings(folder: str, tmp_path: Path, length: int = 8) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f " * 50)
    return Config.make({"model": folder, "data": f"text:{text}", "sequence_length": length})


def test_a_folder_is_trained_on_what_its_vocabulary_and_positions_hold(tmp_path: Path) -> None:
    """Tokens that no sample shows need not be in it: causal text has no mask."""
    words = {word: number for number, word in enumerate(["a", "b", "c", "d", "e", "f", "<|endoftext|>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for kind in ("gpt2", "bert"):
        folder = save(tmp_path / kind, kind, 7)
        tokenizer.save(f"{folder}/tokenizer.json")
    assembly = assemble(settings(str(tmp_path / "gpt2"), tmp_path))
    batch = assembly.train.batch([0, 1], [0, 0])
    assert assembly.model(*batch.inputs).shape == (2, 8, 7)
    with pytest.raises(ConfigError, match="below 7, and the text has tokens up to 7"):
        assemble(settings(str(tmp_path / "bert"), tmp_path))
    folder = save(tmp_path / "roberta", "roberta", 300)
    assert assemble(settings(folder, tmp_path, length=LENGTH)).model.training
    with pytest.raises(ConfigError, match="length 17: the model .* 16 tokens"):
        assemble(settings(folder, tmp_path, length=LENGTH + 1))
