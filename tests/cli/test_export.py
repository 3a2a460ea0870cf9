"""Tests of ``hvd-ckpt export``: other tools get the trained model and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from same import assert_same
from snapshot_files import write

pytest.importorskip("transformers")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.training.config import Config

OPTIONS: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2}
LENGTH = 12
CLASSES = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "xlnet": "XLNetLMHeadModel"}
CLASSES["gpt2"] = "GPT2LMHeadModel"
TEXT = "To be, or not to be: that is the question \u2014 whether 'tis nobler in the mind to suffer.\n" * 9


def run_of(folder: Path, name: str, **settings: Any) -> torch.nn.Module:
    """Writes the snapshot of a run; returns its model."""
    (folder / "text.txt").write_text(TEXT)
    config = Config(model=name, model_options=OPTIONS, sequence_length=LENGTH, **settings)
    tokens = Tokens(folder / "text.txt", config.tokenizer, cache=folder / "cache")
    facts = {"vocabulary": tokens.vocabulary, "length": LENGTH}
    model = catalog.find(name).build(facts, OPTIONS).eval()
    replicated = {"config": config.as_dict(), "optimizer": {}}
    write(folder / "run" / "snapshots", 3, replicated, {}, model.state_dict())
    return model


def export(folder: Path, kind: str, output: str, status: int = 0) -> str:
    words = ["export", str(folder / "run"), "--format", kind, "--output", str(folder / output)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("family", CLASSES)
def test_transformers_loads_the_model_and_its_tokenizer(family: str, tmp_path: Path) -> None:
    settings = {}
    if family in ("bert", "gpt2"):  # the others' tokens are bytes
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["[UNK]", "[MASK]"])
        tokenizer.train_from_iterator([TEXT], trainer)
        tokenizer.save(str(tmp_path / "tokens.json"))
        settings = {"tokenizer": str(tmp_path / "tokens.json")}
    model = run_of(tmp_path, f"{family}-tiny", **settings)
    output = tmp_path / "made" / "model"
    assert "Weights of step 3" in export(tmp_path, "hf", "made/model")
    assert [path.name for path in output.parent.iterdir()] == ["model"]

    kind: Any = getattr(transformers, CLASSES[family])
    theirs, found = kind.from_pretrained(output, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    known: Any = transformers.AutoTokenizer.from_pretrained(output)
    tokens = Tokens(tmp_path / "text.txt", settings.get("tokenizer"), cache=tmp_path / "cache")
    assert known(TEXT, add_special_tokens=False)["input_ids"] == tokens.array.tolist()
    special = (known.mask_token_id, known.pad_token_id, known.cls_token_id, known.sep_token_id)
    assert special == (tokens.mask, tokens.padding, tokens.start, tokens.separator)
    if not settings:
        assert known.decode(tokens.array.tolist()) == TEXT
    batch = torch.tensor(tokens.array[: 2 * LENGTH].tolist()).view(2, LENGTH)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(batch).logits, model(batch))

    assert "is there" in export(tmp_path, "hf", "made/model", status=2)


def test_pt_and_what_cannot_be_exported(tmp_path: Path) -> None:
    model = run_of(tmp_path, "gpt-tiny")
    export(tmp_path, "pt", "weights.pt")
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert_same(found, dict(model.state_dict()))
    assert "gpt-tiny is not one of transformers" in export(tmp_path, "hf", "hf", status=2)
    write(tmp_path / "run" / "snapshots", 4, {"loop": {}}, {}, {"w": torch.ones(2)})
    assert "written by a loop of your own" in export(tmp_path, "hf", "hf", status=2)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "text.txt", "weights.pt"}


def test_token_ids_without_a_tokenizer_leave_as_weights_alone(tmp_path: Path) -> None:
    run_of(tmp_path, "gpt2-tiny", data=f"tokens:{tmp_path / 'ids.bin'},vocabulary=260,type=uint16")
    export(tmp_path, "hf", "model")
    assert (tmp_path / "model" / "config.json").is_file()
    assert not (tmp_path / "model" / "tokenizer.json").exists()
