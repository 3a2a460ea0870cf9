"""Tests of ``hvd-ckpt export``: other tools get the trained model and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
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


def run_of(folder: Path, name: str, options: dict[str, Any] = OPTIONS, **settings: Any) -> torch.nn.Module:
    """Writes the snapshot of a run; returns its model."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    config = Config(model=name, model_options=options, sequence_length=LENGTH, **settings)
    tokens = Tokens(folder / "text.txt", config.tokenizer, cache=folder / "cache")
    torch.manual_seed(1)
    model = catalog.find(name).build({"vocabulary": tokens.vocabulary, "length": LENGTH}, options).eval()
    replicated = {"config": config.as_dict(), "optimizer": {}}
    write(folder / "run" / "snapshots", 3, replicated, {}, model.state_dict())
    return model


def command(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [arguments[0], str(folder / "run"), *arguments[1:]])


@pytest.mark.parametrize("family", CLASSES)
def test_transformers_loads_the_model_and_its_tokenizer(family: str, tmp_path: Path) -> None:
    settings = {}
    if family in ("bert", "gpt2"):  # the others' tokens are bytes
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special_tokens = ["[UNK]", "[MASK]"]
        trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=special_tokens)
        tokenizer.train_from_iterator([TEXT], trainer)
        tokenizer.save(str(tmp_path / "tokens.json"))
        settings = {"tokenizer": str(tmp_path / "tokens.json")}
    model = run_of(tmp_path, f"{family}-tiny", **settings)
    output = tmp_path / "made" / "model"
    result = command(tmp_path, "export", "--format", "hf", "--output", str(output))
    assert result.exit_code == 0 and "Weights of step 3" in result.output, result.output
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

    again = command(tmp_path, "export", "--format", "hf", "--output", str(output))
    assert again.exit_code == 2 and "is there" in again.output


def test_pt_and_what_cannot_be_exported(tmp_path: Path) -> None:
    model = run_of(tmp_path, "gpt-tiny")
    result = command(tmp_path, "export", "--format", "pt", "--output", str(tmp_path / "weights.pt"))
    assert result.exit_code == 0, result.output
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(found) and all(torch.equal(found[name], one) for name, one in model.state_dict().items())
    result = command(tmp_path, "export", "--format", "hf", "--output", str(tmp_path / "hf"))
    assert result.exit_code == 2 and "gpt-tiny is not one of transformers" in result.output
    write(tmp_path / "run" / "snapshots", 4, {"loop": {}}, {}, {"w": torch.ones(2)})
    result = command(tmp_path, "export", "--format", "hf")
    assert result.exit_code == 2 and "written by a loop of your own" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"run", "text.txt", "weights.pt"}


def test_token_ids_without_a_tokenizer_leave_as_weights_alone(tmp_path: Path) -> None:
    run_of(tmp_path, "gpt2-tiny", data=f"tokens:{tmp_path / 'ids.bin'},vocabulary=260,type=uint16")
    output = tmp_path / "model"
    assert command(tmp_path, "export", "--format", "hf", "--output", str(output)).exit_code == 0
    assert (output / "config.json").is_file() and not (output / "tokenizer.json").exists()
