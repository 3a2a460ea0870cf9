"""The models that commands know by name: all can be built, in the sizes of their sources; what is said about what cannot."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from hvd_ckpt import models
from hvd_ckpt.models import catalog
from hvd_ckpt.training.build import assemble
from hvd_ckpt.training.config import Config, ConfigError

FACTS = {"vocabulary": 50, "length": 8, "channels": 1, "classes": 3}


def build_on_meta(name: str, facts: dict[str, int] | None = None, **options: object) -> torch.nn.Module:
    with torch.device("meta"):
        return catalog.find(name).build(facts or FACTS, options)


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_name_builds_a_chain_in_training_mode() -> None:
    assert len(catalog.names()) == len(set(catalog.names()))
    for name in catalog.names():
        entry = catalog.find(name)
        assert (entry.name, entry.folder) == (name, None) and entry.kind in catalog.KINDS
        assert set(entry.data) == {"pixels" if entry.kind in ("images", "volumes") else "length"}
        if name in ("resnet-1001", "resnet-1202"):  # as the others, and slow
            continue
        model = build_on_meta(name, **({"width": 2} if name == "vnet" else {}))
        assert isinstance(model, torch.nn.Sequential) and model.training


@pytest.mark.parametrize(
    "name, facts, count",
    [
        # Turc et al. (2019), table 1: with the pooler, and without the head's layer of the same size.
        ("bert-tiny", {"vocabulary": 30522, "length": 512}, 4.4e6),
        ("bert-mini", {"vocabulary": 30522, "length": 512}, 11.3e6),
        ("bert-small", {"vocabulary": 30522, "length": 512}, 29.1e6),
        ("bert-medium", {"vocabulary": 30522, "length": 512}, 41.7e6),
        ("bert-base", {"vocabulary": 30522, "length": 512}, 110.1e6),
        # As transformers lists its roberta-base and xlnet-base-cased.
        ("roberta-base", {"vocabulary": 50265, "length": 512}, 125e6),
        ("xlnet-base", {"vocabulary": 32000}, 117e6),
        # Of the published weights, with tied head: the paper's own counts are known to be wrong.
        ("gpt2-small", {"vocabulary": 50257, "length": 1024}, 124.44e6),
        ("gpt2-xl", {"vocabulary": 50257, "length": 1024}, 1557.6e6),
        # Brown et al. (2020), table 2.1.
        ("gpt-lite", {"vocabulary": 50257, "length": 2048}, 125e6),
        # Zaremba et al. (2014) give 66 million for the large one.
        ("lstm-large", {"vocabulary": 10000}, 66e6),
    ],
)
def test_sizes_are_the_published_ones(name: str, facts: dict[str, int], count: float) -> None:
    assert parameters(build_on_meta(name, facts)) == pytest.approx(count, rel=0.011)


def test_options_are_what_does_not_follow_from_the_data() -> None:
    assert {"width", "heads", "layers", "dropout", "attention"} <= set(catalog.find("bert-small").options)
    assert set(catalog.find("densenet-121").options) == {"dropout", "efficient"}
    assert catalog.find("resnet-50").options == ()
    for name in catalog.names():
        assert not {"depth", *catalog.FACTS} & set(catalog.find(name).options)


def test_options_go_over_the_presets_and_facts_that_a_model_has_no_use_for_are_left_out() -> None:
    preset, deeper = build_on_meta("xlnet-tiny"), build_on_meta("xlnet-tiny", layers=3)
    assert len(deeper) == len(preset) + 1
    assert build_on_meta("densenet-22", {**FACTS, "channels": 4}).state_dict()["stem.weight"].shape[1] == 4


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("gpt-tiny", {"layer": 2}, "no option of gpt-tiny 'layer': did you mean 'layers'"),
        ("gpt-tiny", {"vocabulary": 9}, "no option of gpt-tiny 'vocabulary'"),
        ("densenet-22", {"depth": 100}, "no option of densenet-22 'depth'"),
        ("resnet-20", {"width": 3}, "no option of resnet-20 'width': there is none"),
        ("bert-tiny", {"layers": 2.5}, "layers must be a whole number, got 2.5"),
        ("bert-tiny", {"layers": True}, "layers must be a whole number, got True"),
        ("bert-tiny", {"dropout": "much"}, "dropout must be a number, got 'much'"),
        ("gpt-tiny", {"tied": 1}, "tied must be true or false, got 1"),
        ("bert-tiny", {"attention": 3}, "attention must be a text, got 3"),
        ("bert-tiny", {"heads": 3}, "width must be a multiple of heads"),
    ],
)
def test_what_no_model_has_or_takes(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        build_on_meta(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, said",
    [
        ("bert_small", "no model 'bert_small': did you mean 'bert-small'?"),
        ("resnet_18", "did you mean 'resnet-18'?"),
        ("unheard-of", "choose one of bert-tiny, -mini, "),
    ],
)
def test_no_such_model(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        catalog.find(name)
    assert "\n" not in str(caught.value)


def test_names_are_listed_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    for name, module in list(sys.modules.items()):
        if name.startswith("hvd_ckpt.models."):  # to be imported anew, here alone
            monkeypatch.setattr(models, name.removeprefix("hvd_ckpt.models."), module)
            monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("hvd_ckpt.models.catalog")
    assert fresh is not catalog and fresh.names() == catalog.names()
    with pytest.raises(ModuleNotFoundError):
        fresh.find("bert-tiny").build(FACTS)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def save(folder: Path, kind: str, vocabulary: int, longest: int) -> str:
    """A folder of a model; its tokenizer knows ``vocabulary`` tokens, the end of a text among them, and no mask."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=longest
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    elif kind == "xlnet":
        config = transformers.XLNetConfig(vocab_size=vocabulary, d_model=16, n_layer=1, n_head=2, d_inner=32)
        transformers.XLNetLMHeadModel(config).save_pretrained(folder)
    else:
        more = 2 if kind == "roberta" else 0  # positions of padding
        name = {"bert": "Bert", "roberta": "Roberta"}[kind]
        config = getattr(transformers, f"{name}Config")(
            vocab_size=vocabulary, max_position_embeddings=longest + more, **SMALL
        )
        getattr(transformers, f"{name}ForMaskedLM")(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "kind, learns, longest",
    [
        ("bert", "masked", 16),
        ("roberta", "masked", 16),
        ("gpt2", "causal", 16),
        ("xlnet", "permutation", None),
    ],
)
def test_a_folder_is_an_entry(kind: str, learns: str, longest: int | None, tmp_path: Path) -> None:
    entry = catalog.find(save(tmp_path, kind, 60, 16))
    assert (entry.kind, entry.folder, entry.options) == (learns, tmp_path, ("checkpoint_interval",))
    model = entry.build(FACTS, {"checkpoint_interval": 2})
    assert model.training and model.checkpoint_interval == 2
    assert catalog.limits(model) == (60, longest)
    assert model(torch.randint(2, 60, (1, longest or 40))).shape == (1, longest or 40, 60)
    if longest:
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            model(torch.randint(2, 60, (1, longest + 1)))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        catalog.find(str(tmp_path))
    save(tmp_path, "bert", 60, 16)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="has no model.safetensors"):
        catalog.find(str(tmp_path)).build(FACTS)


def settings(folder: str, tmp_path: Path, **more: object) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f " * 50)
    return Config.make({"model": folder, "text": str(text), "length": 8, **more})


def test_a_folder_is_trained_on_what_its_vocabulary_holds(tmp_path: Path) -> None:
    """Tokens that no sample shows need not be in it: causal text has no mask."""
    words = {word: number for number, word in enumerate(["a", "b", "c", "d", "e", "f", "<|endoftext|>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for kind in ("gpt2", "bert"):
        folder = tmp_path / kind
        save(folder, kind, 7, 16)
        tokenizer.save(str(folder / "tokenizer.json"))
    assembly = assemble(settings(str(tmp_path / "gpt2"), tmp_path))
    batch = assembly.train.batch([0, 1], [0, 0])
    assert assembly.model(*batch.inputs).shape == (2, 8, 7)
    with pytest.raises(ConfigError) as caught:
        assemble(settings(str(tmp_path / "bert"), tmp_path))
    assert "it knows the tokens below 7, and the text has tokens up to 7: give" in str(caught.value)


def test_a_folder_takes_no_longer_samples_than_it_has_positions(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "roberta", 300, 16)
    assert assemble(settings(folder, tmp_path, length=16)).model.training
    with pytest.raises(ConfigError, match="length 17: the model .* 16 tokens"):
        assemble(settings(folder, tmp_path, length=17))
