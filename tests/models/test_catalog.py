"""The models that commands know by name: published sizes, options, and folders of Hugging Face models."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from random_text import random_step
from same import assert_same, gradients
from torch import nn

from hvd_ckpt.app import models
from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.models.hugging_face import from_folder, kind_of_folder
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError

FACTS = {"vocabulary": 50, "length": 8, "channels": 1, "classes": 3}
BERT, WORDS = {"vocabulary": 30522, "length": 512}, {"vocabulary": 10_000}
IMAGENET, CIFAR = {"channels": 3, "classes": 1000}, {"channels": 3, "classes": 10}


def build_on_meta(name: str, facts: dict[str, int] = FACTS, **options: object) -> nn.Module:
    with torch.device("meta"):
        return catalog.find(name).build(facts, options)


@functools.cache
def parameters(name: str, **facts: int) -> int:
    return sum(parameter.numel() for parameter in build_on_meta(name, facts).parameters())


def test_every_name_builds_a_chain_in_training_mode() -> None:
    assert len(catalog.names()) == len(set(catalog.names()))
    for name in catalog.names():
        entry = catalog.find(name)
        assert (entry.name, entry.folder) == (name, None) and entry.kind in catalog.KINDS
        assert set(entry.data) == {"pixels" if entry.kind in ("images", "volumes") else "length"}
        assert "depth" not in entry.options
        if name not in ("resnet-1001", "resnet-1202"):  # as resnet-164 and resnet-110, and slow
            model = build_on_meta(name, **({"width": 2} if name == "vnet" else {}))
            assert isinstance(model, nn.Sequential) and model.training


@pytest.mark.parametrize(
    "name, facts, published, tolerance",
    [
        # Turc et al. (2019), table 1: with the pooler, and without the head's layer of the same size.
        ("bert-tiny", BERT, 4.4e6, 0.05e6),
        ("bert-mini", BERT, 11.3e6, 0.1e6),
        ("bert-small", BERT, 29.1e6, 0.32e6),
        ("bert-medium", BERT, 41.7e6, 0.45e6),
        ("bert-base", BERT, 110.1e6, 1e6),
        # As transformers lists its roberta-base and xlnet-base-cased.
        ("roberta-base", {"vocabulary": 50265, "length": 512}, 125e6, 1e6),
        ("xlnet-base", {"vocabulary": 32000}, 117e6, 1e6),
        # Of the published weights, with tied head: the paper's own counts are known to be wrong.
        ("gpt2-small", {"vocabulary": 50257, "length": 1024}, 124.44e6, 5e3),
        ("gpt2-xl", {"vocabulary": 50257, "length": 1024}, 1557.6e6, 5e4),
        # "GPT-3 Small" of Brown et al. (2020), table 2.1; with 1024 positions it is GPT-2 small, as published.
        ("gpt-lite", {"vocabulary": 50257, "length": 2048}, 125e6, 5e5),
        ("gpt-lite", {"vocabulary": 50257, "length": 1024}, 124_439_808, 0),
        # Merity et al. (2016), table 2, models of Zaremba et al. (2014).
        ("lstm-medium", WORDS, 20e6, 5e5),
        ("lstm-large", WORDS, 66e6, 5e5),
        # torchvision, num_params of its weights.
        ("densenet-121", IMAGENET, 7_978_856, 0),
        ("densenet-161", IMAGENET, 28_681_000, 0),
        ("densenet-169", IMAGENET, 14_149_480, 0),
        ("densenet-201", IMAGENET, 20_013_928, 0),
        ("resnet-18", IMAGENET, 11_689_512, 0),
        ("resnet-34", IMAGENET, 21_797_672, 0),
        ("resnet-50", IMAGENET, 25_557_032, 0),
        ("resnet-101", IMAGENET, 44_549_160, 0),
        ("resnet-152", IMAGENET, 60_192_808, 0),
        # Huang et al. (2017), table 2; He et al. (2015), table 6; He et al. (2016), table 4.
        ("densenet-100", CIFAR, 0.8e6, 5e4),
        ("resnet-20", CIFAR, 0.27e6, 5e3),
        ("resnet-32", CIFAR, 0.46e6, 5e3),
        ("resnet-44", CIFAR, 0.66e6, 5e3),
        ("resnet-56", CIFAR, 0.85e6, 5e3),
        ("resnet-110", CIFAR, 1.7e6, 5e4),
        ("resnet-164", CIFAR, 1.7e6, 5e4),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, facts: dict[str, int], published: float, tolerance: float
) -> None:
    assert parameters(name, **facts) == pytest.approx(published, abs=tolerance)


def test_options_go_over_the_presets_and_facts_that_a_model_has_no_use_for_are_left_out() -> None:
    assert {"width", "heads", "layers", "dropout", "attention"} <= set(catalog.find("bert-small").options)
    assert set(catalog.find("densenet-121").options) == {"channels", "classes", "dropout", "efficient"}
    scores = build_on_meta("gpt-tiny", vocabulary=99)(torch.zeros(1, 2, dtype=int, device="meta"))
    assert scores.shape == (1, 2, 99)
    assert len(build_on_meta("xlnet-tiny", layers=3)) == len(build_on_meta("xlnet-tiny")) + 1
    assert build_on_meta("densenet-22", {**FACTS, "channels": 4}).state_dict()["stem.weight"].shape[1] == 4


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("gpt-tiny", {"layer": 2}, "'layer': did you mean 'layers'"),
        ("gpt-tiny", {"vocabulary": "many"}, 'vocabulary is "many"'),
        ("resnet-20", {"width": 3}, "'width'"),
        ("bert-tiny", {"layers": 2.5}, "layers is 2.5"),
        ("bert-tiny", {"layers": True}, "layers is true"),
        ("bert-tiny", {"dropout": "much"}, 'dropout is "much"'),
        ("gpt-tiny", {"tied": 1}, "tied is 1"),
        ("bert-tiny", {"attention": 3}, "attention is 3"),
        ("bert-tiny", {"heads": 3}, "heads=3"),
        ("bert_small", {}, "'bert_small': did you mean 'bert-small'?"),
        ("unheard-of", {}, "choose one of bert-tiny, -mini, "),
        ("textwrap:shorten", {"text": "a"}, "textwrap:shorten needs width"),
    ],
)
def test_unknown_names_options_and_values(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        build_on_meta(name, **options)
    assert "\n" not in str(caught.value)


def test_names_are_listed_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    for name, module in list(sys.modules.items()):
        if name.startswith("hvd_ckpt.app.models."):  # to be imported anew, here alone
            monkeypatch.setattr(models, name.removeprefix("hvd_ckpt.app.models."), module)
            monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("hvd_ckpt.app.models.catalog")
    assert fresh is not catalog and fresh.names() == catalog.names()
    with pytest.raises(ModuleNotFoundError):
        fresh.find("bert-tiny").build(FACTS)


# ---- folders ----

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
