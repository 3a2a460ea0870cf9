"""Tests of token ids from other tools and of texts of documents: their samples, and one line for invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import hvd_ckpt as hc
from hvd_ckpt.app.datasets.shards import Shards
from hvd_ckpt.app.datasets.text import IGNORED, CausalText, MaskedText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.parallel.pipeline.chain import Chain

IDS = numpy.random.default_rng(0).integers(0, 300, 1000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tokenizer(path: Path) -> None:
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "</s>": 4}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def failure(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        hc.training.assemble(hc.training.Config(**{"model": "gpt-tiny", "sequence_length": 8, **settings}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -------------------------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", ">u2"])
def test_shards_are_one_text_whatever_their_type(kind: str, folder: Path) -> None:
    (folder / "ids" / "b").mkdir(parents=True)
    IDS[:333].astype("<u2").tofile(folder / "ids" / "a.bin")
    numpy.save(folder / "ids" / "b" / "b.npy", IDS[333:334].astype(kind))
    numpy.save(folder / "ids" / "c.npy", IDS[334:].astype(kind))
    (folder / "ids" / "readme.txt").write_text("not token ids")
    data = CausalText(Shards("ids", vocabulary=300, token_type="uint16"), 10)
    batch = data.batch(range(len(data)), [0] * len(data))
    assert len(data) == 99 and batch.inputs[0].flatten().tolist() == IDS[:990].tolist()
    assert batch.targets.flatten().tolist() == IDS[1:991].tolist()
    training, evaluation = data.split(0.1)
    assert evaluation is not None and len(training) == 89
    assert evaluation.batch([0], [0]).inputs[0][0].tolist() == IDS[890:900].tolist()


def test_files_stay_on_the_disk(folder: Path) -> None:
    IDS.astype("<u2").tofile(folder / "ids.bin")
    numpy.save(folder / "ids.npy", IDS.astype(numpy.uint32))
    for name in ("ids.bin", "ids.npy"):
        array = Shards(name, vocabulary=300, token_type="uint16").array
        assert isinstance(array.base, numpy.memmap) and not array.flags.writeable and len(array) == 1000


def test_the_vocabulary_is_given_or_that_of_a_tokenizer_beside_the_ids(folder: Path) -> None:
    ids = numpy.array([1, 2, 3, 4] * 20, dtype=numpy.uint16)
    ids.tofile(folder / "ids.bin")
    settings: dict[str, Any] = {
        "data": "tokens:ids.bin,type=uint16",
        "sequence_length": 8,
        "model_options": {"layers": 1},
    }

    def size(model: str, **others: Any) -> int:
        made = hc.training.assemble(hc.training.Config(model, **{**settings, **others})).model
        assert isinstance(made, Chain)
        return max(
            len(one) for name, one in made.state_dict().items() if "tokens.weight" in name or "word_" in name
        )

    assert "give vocabulary" in failure(data="tokens:ids.bin")
    assert size("gpt-tiny", data="tokens:ids.bin,vocabulary=50257,type=uint16") == 50257
    assert size("bert-tiny", data="tokens:ids.bin,vocabulary=7,type=uint16") == 8  # and the mask
    write_tokenizer(folder / "tokenizer.json")
    assert size("gpt-tiny") == 5
    data = MaskedText(Shards("ids.bin", "tokenizer.json", token_type="uint16"), 8)
    assert (data.tokens.separator, data.tokens.mask) == (4, 5)


def test_an_id_beyond_the_vocabulary_is_found_before_training(folder: Path) -> None:
    IDS.astype("<u2").tofile(folder / "ids.bin")
    at = int((IDS >= 299).argmax())
    said = failure(data="tokens:ids.bin,vocabulary=299,type=uint16")
    assert f"'ids.bin' has the token id 299 at position {at}, and the vocabulary has 299" in said
    assert failure(data="tokens:ids.bin,vocabulary=299,type=uint16") == said  # checked again
    Shards("ids.bin", vocabulary=300, token_type="uint16")
    assert len(list(folder.glob("cache/**/*.checked"))) == 1
    changed = IDS.astype("<u2")
    changed[-1] = 300
    changed.tofile(folder / "ids.bin")
    assert "token id 300 at position 999" in failure(data="tokens:ids.bin,vocabulary=300,type=uint16")
    numpy.save(folder / "ids.npy", numpy.array([5, -1] * 50))
    assert "token id -1 at position 1" in failure(data="tokens:ids.npy,vocabulary=300")


def test_files_that_are_not_token_ids(folder: Path) -> None:
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "text.npy").write_text("text")
    numpy.save(folder / "float.npy", numpy.zeros(9))
    numpy.save(folder / "rows.npy", numpy.zeros((3, 9), numpy.int32))
    numpy.save(folder / "none.npy", numpy.zeros(0, numpy.int32))
    (folder / "folder").mkdir()
    for name, said in {
        "odd.bin": "give type=uint16", "odd.bin,type=uint16": "multiple of 2",
        "text.npy": "cannot use the token ids in 'text.npy'", "float.npy": "float64 of shape (9,)",
        "rows.npy": "int32 of shape (3, 9)", "none.npy": "is empty", "missing.bin": "No such file", "folder": ".bin or .npy",
    }.items():  # fmt: skip
        assert said in failure(data=f"tokens:{name},vocabulary=300")
    assert "'uint32'" in failure(data="tokens:odd.bin,vocabulary=300,type=uint31")
    assert "leave it out" in failure(model="resnet-20", sequence_length=None, data="tokens:odd.bin")


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", "int64"])
def test_bin_files_without_a_type_are_refused_until_it_is_given(kind: str, folder: Path) -> None:
    IDS.astype(numpy.dtype(kind).newbyteorder("<")).tofile(folder / "ids.bin")
    assert "type=" in failure(data="tokens:ids.bin,vocabulary=300")
    config = hc.training.Config(
        "gpt-tiny", data=f"tokens:ids.bin,vocabulary=300,type={kind}", sequence_length=8, validation_split=0
    )
    train = hc.training.assemble(config).train
    batch = train.batch(range(len(train)), [0] * len(train))
    assert batch.inputs[0].flatten().tolist() == IDS[: len(train) * 8].tolist()
    IDS[:999].astype("<u2").tofile(folder / "ids.bin")
    assert "multiple of 4" in failure(data="tokens:ids.bin,vocabulary=300,type=uint32")


@pytest.mark.parametrize(("magic", "kind"), [(20240520, "<u2"), (20240801, "<u4")])
def test_files_of_llm_c_state_their_type(magic: int, kind: str, folder: Path) -> None:
    header = numpy.zeros(256, "<i4")
    header[:3] = magic, 1, len(IDS)
    content = header.tobytes() + IDS.astype(kind).tobytes()
    (folder / "ids.bin").write_bytes(content)
    for vocabulary in (300, 128256):
        array = Shards("ids.bin", vocabulary=vocabulary).array
        assert numpy.asarray(array[:2000]).tolist() == IDS.tolist()
    assert "not int64" in failure(data="tokens:ids.bin,vocabulary=300,type=int64")
    (folder / "cut.bin").write_bytes(content[:-40])
    assert "1000 ids" in failure(data="tokens:cut.bin,vocabulary=300")


@pytest.mark.parametrize(
    ("code", "kind"), [(1, "uint8"), (4, "int32"), (5, "int64"), (8, "uint16"), (7, "float32")]
)
def test_files_of_megatron_state_their_type_beside_them(code: int, kind: str, folder: Path) -> None:
    ids = IDS % 200
    ids.astype(kind).tofile(folder / "ids.bin")
    (folder / "ids.idx").write_bytes(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code, 0, 0]))
    if kind == "float32":
        assert "number 7" in failure(data="tokens:ids.bin,vocabulary=300")
    else:
        array = Shards("ids.bin", vocabulary=300).array
        assert numpy.asarray(array[:1000]).tolist() == ids.tolist()


# -------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("form", ["lines", "jsonl"])
@pytest.mark.parametrize("tokenized", [False, True])
def test_documents_are_packed_and_nothing_is_predicted_across_their_ends(
    form: str, tokenized: bool, folder: Path
) -> None:
    (folder / "texts").mkdir()
    texts = ["one two", "three", "two one three two"] * 20
    lines = texts if form == "lines" else [json.dumps({"id": 7, "text": text}) for text in texts]
    for name, some in (("a", lines[:30]), ("b", lines[30:])):
        (folder / "texts" / name).with_suffix(".txt" if form == "lines" else ".jsonl").write_text(
            "\n".join(some) + "\n\n"
        )
    write_tokenizer(folder / "tokenizer.json")
    words = {"one": 1, "two": 2, "three": 3}
    ends = 4 if tokenized else 259
    expected = [
        token
        for text in texts
        for token in [*([words[word] for word in text.split()] if tokenized else text.encode()), ends]
    ]
    settings: dict[str, Any] = {"tokenizer": "tokenizer.json"} if tokenized else {}
    config = hc.training.Config(
        "gpt-tiny", data=f"{form}:texts", sequence_length=16, validation_split=0, **settings
    )
    train = hc.training.assemble(config).train
    assert len(train) == (len(expected) - 1) // 16
    batch = train.batch(range(len(train)), [0] * len(train))
    inputs, targets = batch.inputs[0].flatten().tolist(), batch.targets.flatten().tolist()
    assert inputs == expected[: len(inputs)] and inputs.count(ends) > 10
    for at, (shown, asked) in enumerate(zip(inputs, targets)):
        assert asked == (IGNORED if shown == ends else expected[at + 1])
    if form == "lines":  # the cache keeps the two apart
        assert len(Tokens("texts", **settings)) != len(Tokens("texts", documents="lines", **settings))
    one = train.batch([1], [0])  # a single sample, too
    assert one.targets[0].tolist() == targets[16:32] and one.inputs[0][0].tolist() == inputs[16:32]


def test_documents_that_cannot_be_read(folder: Path) -> None:
    for name, content, form, said in (
        ("list.jsonl", b'{"text": "one"}\n[1]\n', "jsonl", "line 2 of 'list.jsonl' is not a JSON object"),
        ("cut.jsonl", b'\n{"text": "on', "jsonl", "line 2 of 'cut.jsonl'"),
        ("number.jsonl", b'{"text": 3}', "jsonl", "line 1 of 'number.jsonl'"),
        ("latin.txt", b"one\n\xe9", "lines", "'latin.txt' is not UTF-8"),
        ("blank.txt", b"\n \n", "lines", "gives no tokens"),
    ):
        (folder / name).write_bytes(content)
        assert said in failure(data=f"{form}:{name}")
    (folder / "half.jsonl").write_text('{"text": "a\\ud800b"}\n' * 9)
    assert hc.training.assemble(
        hc.training.Config("gpt-tiny", data="jsonl:half.jsonl", sequence_length=8)
    ).train
