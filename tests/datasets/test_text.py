"""Tests of text as tokens, of ids from other tools and of documents: their samples, masks, and one line for invalid files."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from batches import assert_refused, same_batch, whole
from snapshot_files import file_size_limit
from tokenizers import Tokenizer, models, pre_tokenizers

import hvd_ckpt as hc
from hvd_ckpt.app.datasets.images import ImageFolder
from hvd_ckpt.app.datasets.shards import Shards
from hvd_ckpt.app.datasets.text import IGNORED, CausalText, MaskedText, PermutedText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.training.config import ConfigError

IDS = numpy.random.default_rng(0).integers(0, 300, 1000)
WORDS = {"[UNK]": 0, "[PAD]": 1, "the": 2, "cat": 3, "sat": 4, "</s>": 5}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with the cache in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(numpy.random.default_rng(0).integers(32, 127, 20_000, dtype=numpy.uint8).tobytes())
    return path


@pytest.fixture
def tokenizer(tmp_path):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def assembled(model="gpt-tiny", **settings):
    """What a run trains with these settings, and on what."""
    return hc.training.assemble(hc.training.Config(model, **{"sequence_length": 8, **settings}))


def assert_config_refused(says, **settings):
    assert_refused(says, assembled, error=ConfigError, **settings)


# ------------------------------------------------------------------------------------------- tokens


def test_one_file_of_bytes_is_mapped_as_it_is(text, tmp_path):
    tokens = Tokens(text, cache=tmp_path / "cache")
    assert tokens.array.tobytes() == text.read_bytes() and not (tmp_path / "cache").exists()
    assert isinstance(tokens.array.base, numpy.memmap) and not tokens.array.flags.writeable
    special = {tokens.mask, tokens.padding, tokens.start, tokens.separator}
    assert special == {256, 257, 258, 259} and tokens.vocabulary == 260 and tokens.ordinary == 256
    library = Tokens(cache=tmp_path)  # the standard one, without a text
    assert len(library) > 1 << 20
    assert b"import" in library.array[: 1 << 16].astype(numpy.uint8).tobytes()


def test_a_folder_is_its_text_files_in_order(tmp_path):
    folder, contents = tmp_path / "folder", {"a/z.md": b"one", "b.txt": b"two", "c.PY": b"\xff\x00"}
    left_out = dict.fromkeys(("d.bin", ".hidden.txt", ".git/e.txt"), b"no")
    for name, content in {**contents, **left_out, "empty.txt": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (tmp_path / "outside.txt").write_text("no")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "loop").symlink_to(folder)
    tokens = Tokens(folder, cache=tmp_path / "cache")
    between = [tokens.separator]
    assert tokens.array.tolist() == [*b"one", *between, *b"two", *between, 255, 0]


def test_a_cache_is_found_again_until_something_changes(tmp_path, text, tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "hvd_ckpt" / "tokens"
    text.write_text("the cat sat\n" * 3_000)
    calls = []  # it is on the disk before it has its name
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            patch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))
        first = Tokens(text, tokenizer).array.copy()
    assert calls == ["fsync", "replace"]
    (file,) = cache.iterdir()
    made = file.stat().st_mtime_ns
    assert numpy.array_equal(Tokens(text, tokenizer).array, first) and file.stat().st_mtime_ns == made
    text.write_text("the cat\n" * 3_000)
    assert len(Tokens(text, tokenizer)) == 6_000
    assert len(list(cache.iterdir())) == 2
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(name)
    with ThreadPoolExecutor(8) as pool:  # several at once
        arrays = list(pool.map(lambda _: Tokens(folder).array, range(8)))
    assert all(array.tolist() == [*b"one", 259, *b"two"] for array in arrays)
    assert len(list(cache.iterdir())) == 3
    text.write_text("cat\n" * 3_000)
    with file_size_limit(100):  # as on a full disk, which is that of the cache
        assert_refused(str(cache), Tokens, text, tokenizer)
    assert len(list(cache.iterdir())) == 3


def test_a_tokenizer_encodes_whole_text_and_its_special_tokens_are_known(tmp_path, text, tokenizer):
    words = numpy.random.default_rng(1).choice(["the", "cat", "sat"], 300_000).tolist()
    text.write_text(" ".join(words[:150_000]) + "\n" + "\n".join(words[150_000:]))
    tokens = Tokens(text, tokenizer, cache=tmp_path / "cache")
    # The first line is long enough to be cut: a word may fall apart there, into two unknown ones.
    expected = [{"the": 2, "cat": 3, "sat": 4}[word] for word in words]
    assert tokens.array[-150_000:].tolist() == expected[-150_000:]
    assert (tokens.array == 0).sum() < 20 and abs(len(tokens) - 300_000) < 20
    assert (tokens.padding, tokens.separator) == (1, 5)
    assert {tokens.mask, tokens.start} == {6, 7} and tokens.ordinary == 6 and tokens.vocabulary == 8
    text.write_bytes(b"the cat\xff")
    assert_refused("not UTF-8", Tokens, text, tokenizer, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-made is left


def test_missing_or_unusable_text_is_an_error(tmp_path, text, tokenizer):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b"  \n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "sparse").mkdir()
    for name, size in (("huge.json", 1 << 40), ("sparse/a.txt", 1 << 43), ("sparse/b.txt", 1 << 43)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    cache, taken = tmp_path / "cache", text
    for says, *arguments in (
        ("No such file", tmp_path / "missing"),
        ("is empty", tmp_path / "empty"),
        ("holds no text", tmp_path / "folder"),
        ("neither", "/dev/null"),
        ("no tokens", tmp_path / "blank", tokenizer, cache),
        ("No such file", text, tmp_path / "missing"),
        ("not a JSON file of the tokenizers library", text, text),
        ("1,099,511,627,776 bytes", text, tmp_path / "huge.json"),
        ("text.txt", text, tokenizer, taken),
    ):
        assert_refused(says, Tokens, *arguments)
    with file_size_limit(1 << 20):  # for the room of the disk, not of the file
        assert_refused("35,184,372,088,834 bytes", Tokens, tmp_path / "sparse", cache=cache)
    for kind in (CausalText, MaskedText, PermutedText):
        assert_refused("less than two samples", kind, Tokens(text), 10_001)


def test_no_folder_that_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "class" / "locked").mkdir(parents=True)
    for name in ("a.txt", "a.png"):
        (tmp_path / "class" / name).write_text("a")
    assert len(Tokens(tmp_path, cache=tmp_path)) == len(ImageFolder(tmp_path, 8)) == 1
    monkeypatch.setattr(os, "scandir", refusing)
    assert_refused("Permission denied", Tokens, tmp_path)
    assert_refused("Permission denied", ImageFolder, tmp_path, 8)


# --------------------------------------------------------------------------------------- text samples


def test_the_end_of_the_text_is_held_out(text):
    data = MaskedText(Tokens(text), 100, seed=1)
    training, evaluation = data.split(0.1)
    assert (len(training), len(evaluation)) == (180, 20)
    assert same_batch(training.batch([179], [2]), data.batch([179], [2]))
    assert same_batch(evaluation.batch([0, 19], [2, 2]), data.batch([180, 199], [2, 2]))
    everything, nothing = data.split(0)
    assert len(everything) == 200 and nothing is None
    for number in (20, -1):
        assert_refused(f"sample {number} ", evaluation.batch, [number], [0], error=IndexError)
    assert_refused("an epoch for each sample", data.batch, [0, 1], [0])


def test_masked_text_hides_as_bert_does(text):
    tokens = Tokens(text)
    batch = whole(MaskedText(tokens, 100, seed=1))
    shown, targets = batch.inputs[0], batch.targets
    truth = torch.tensor(list(text.read_bytes())).view(200, 100)
    asked = targets != IGNORED
    assert (asked.sum(1) == 15).all()
    assert torch.equal(targets[asked], truth[asked]) and torch.equal(shown[~asked], truth[~asked])
    hidden = (shown == tokens.mask)[asked].double().mean()
    kept = (shown == truth)[asked].double().mean()
    assert abs(hidden - 0.8) < 0.03 and abs(kept - 0.1) < 0.03
    assert (shown[asked & (shown != tokens.mask)] < 256).all()
    assert (asked.sum(0) > 10).all()  # 30 on average: no position is left out
    assert (MaskedText(tokens, 4).batch([0], [0]).targets != IGNORED).sum() == 1


@pytest.mark.parametrize("kind", [MaskedText, PermutedText])
def test_random_numbers_depend_on_seed_epoch_and_sample_only(kind, text):
    tokens = Tokens(text)
    data = kind(tokens, 100, seed=1)
    together = data.batch([7, 3, 7, 7], [0, 1, 2, 0])
    alone = [data.batch([sample], [epoch]) for sample, epoch in ((7, 0), (3, 1), (7, 2), (7, 0))]
    assert all(map(same_batch, together.split(4), alone))
    assert not same_batch(alone[0], alone[2])
    assert not same_batch(alone[0], kind(tokens, 100, seed=2).batch([7], [0]))


def test_permuted_text_predicts_spans_in_every_order(text):
    batch = PermutedText(Tokens(text), 60, seed=1).batch(range(300), [0] * 300)
    mapping, hidden = batch.shared["target_mapping"], batch.shared["perm_mask"]
    assert mapping.shape == (300, 10, 60) and hidden.shape == (300, 60, 60)
    assert mapping.dtype == hidden.dtype == torch.float32 and (mapping.sum(2) == 1).all()
    places = mapping.argmax(2)
    assert torch.equal(batch.inputs[0].gather(1, places), batch.targets) and (places.diff() > 0).all()
    asked = mapping.sum(1)
    assert (asked.sum(1) == 10).all() and (asked.sum(0) > 10).all()  # 50 on average, fewer at the ends
    starts = (asked - torch.nn.functional.pad(asked, (1, 0))[:, :-1]).clamp(min=0).sum()
    assert 2.4 < asked.sum() / starts < 3.1  # spans of 3 on average, but for the cut of the last
    for seen, is_context, predicted in zip(1 - hidden, asked == 0, places):
        assert seen[:, is_context].all() and not seen[is_context][:, predicted].any()
        # Among themselves: each sees those before it, so the first none and the last all but itself.
        assert sorted(seen[predicted][:, predicted].sum(1).tolist()) == list(range(10))
    first = (1 - hidden).sum(2).gather(1, places).argmin(1)
    assert len(set(first.tolist())) == 10


# -------------------------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", "int64"])
def test_shards_are_one_text_whatever_their_type(kind, folder):
    little = numpy.dtype(kind).newbyteorder("<")
    (folder / "ids" / "b").mkdir(parents=True)
    IDS[:333].astype(little).tofile("ids/a.bin")
    numpy.save("ids/b/b.npy", IDS[333:334].astype(little.newbyteorder(">")))
    numpy.save("ids/c.npy", IDS[334:].astype(kind))
    (folder / "ids" / "readme.txt").write_text("not token ids")
    for name in ("ids/a.bin", "ids/c.npy"):
        array = Shards(name, vocabulary=300, token_type=kind).array
        assert isinstance(array.base, numpy.memmap) and not array.flags.writeable
    data = CausalText(Shards("ids", vocabulary=300, token_type=kind), 10)
    batch = whole(data)
    assert batch.inputs[0].dtype == batch.targets.dtype == torch.int64 and len(data) == 99
    assert batch.inputs[0].flatten().tolist() == IDS[:990].tolist()
    assert batch.targets.flatten().tolist() == IDS[1:991].tolist()


def of_llm_c(magic):
    return numpy.array([magic, 1, len(IDS), *[0] * 253], "<i4").tobytes()


def of_megatron(code):
    return b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code, 0, 0])


@pytest.mark.parametrize(
    ("kind", "header", "index"),
    [
        ("<u2", of_llm_c(20240520), b""),
        ("<u4", of_llm_c(20240801), b""),
        ("uint8", b"", of_megatron(1)),
        ("int32", b"", of_megatron(4)),
        ("int64", b"", of_megatron(5)),
        ("uint16", b"", of_megatron(8)),
    ],
)
def test_files_of_llm_c_and_megatron_state_their_type(kind, header, index, folder):
    ids = IDS % 200
    (folder / "ids.bin").write_bytes(header + ids.astype(kind).tobytes())
    (folder / "ids.idx").write_bytes(index)
    for vocabulary in (200, 128256):
        assert numpy.asarray(Shards("ids.bin", vocabulary=vocabulary).array).tolist() == ids.tolist()


def test_the_vocabulary_is_given_or_that_of_a_tokenizer_beside_the_ids(request):
    def rows(vocabulary="", model="gpt-tiny"):
        """Of the embedding."""
        made = assembled(model, data=f"tokens:ids.bin{vocabulary},type=uint16", model_options={"layers": 1})
        state = made.model.state_dict().items()
        return max(len(one) for name, one in state if "tokens.weight" in name or "word_" in name)

    numpy.array([1, 2, 3, 4] * 20, dtype=numpy.uint16).tofile("ids.bin")
    assert_config_refused("give vocabulary", data="tokens:ids.bin")
    assert rows(",vocabulary=507") == 507
    assert rows(",vocabulary=7", "bert-tiny") == 8  # and the mask
    tokenizer = request.getfixturevalue("tokenizer")
    assert rows() == 6
    data = MaskedText(Shards("ids.bin", tokenizer, token_type="uint16"), 8)
    assert (data.tokens.separator, data.tokens.mask) == (5, 6)


def test_an_id_beyond_the_vocabulary_is_found_before_training(folder):
    IDS.astype("<u2").tofile("ids.bin")
    at = int((IDS >= 299).argmax())
    for _ in range(2):  # checked again
        says = f"'ids.bin' has the token id 299 at position {at}, and the vocabulary has 299"
        assert_config_refused(says, data="tokens:ids.bin,vocabulary=299,type=uint16")
    Shards("ids.bin", vocabulary=300, token_type="uint16")
    assert len(list(folder.glob("cache/**/*.checked"))) == 1
    numpy.append(IDS[:-1], 300).astype("<u2").tofile("ids.bin")
    assert_config_refused("token id 300 at position 999", data="tokens:ids.bin,vocabulary=300,type=uint16")
    numpy.save("ids.npy", numpy.array([5, -1] * 50))
    assert_config_refused("token id -1 at position 1", data="tokens:ids.npy,vocabulary=300")


def test_files_that_are_not_token_ids(folder):
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "text.npy").write_text("text")
    numpy.save("float.npy", numpy.zeros(9))
    numpy.save("rows.npy", numpy.zeros((3, 9), numpy.int32))
    numpy.save("none.npy", numpy.zeros(0, numpy.int32))
    (folder / "folder").mkdir()
    (folder / "llm.c.bin").write_bytes(of_llm_c(20240520) + bytes(2 * len(IDS)))
    (folder / "cut.bin").write_bytes(of_llm_c(20240520) + bytes(1960))
    (folder / "float.bin").write_bytes(bytes(40))
    (folder / "float.idx").write_bytes(of_megatron(7))
    for name, says in {
        "odd.bin": "give type=uint16",
        "odd.bin,type=uint16": "multiple of 2",
        "odd.bin,type=uint32": "multiple of 4",
        "odd.bin,type=uint31": "'uint32'",
        "llm.c.bin,type=int64": "not int64",
        "cut.bin": "1000 ids",
        "float.bin": "number 7",
        "text.npy": "cannot use the token ids in 'text.npy'",
        "float.npy": "float64 of shape (9,)",
        "rows.npy": "int32 of shape (3, 9)",
        "none.npy": "is empty",
        "missing.bin": "No such file",
        "folder": ".bin or .npy",
    }.items():
        assert_config_refused(says, data=f"tokens:{name},vocabulary=300")
    assert_config_refused("leave it out", model="resnet-20", sequence_length=None, data="tokens:odd.bin")


# -------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("form", ["lines", "jsonl"])
@pytest.mark.parametrize("tokenized", [False, True])
def test_documents_are_packed_and_nothing_is_predicted_across_their_ends(form, tokenized, folder, tokenizer):
    documents = ["the cat", "sat", "cat the sat cat"] * 20
    lines = documents if form == "lines" else [json.dumps({"id": 7, "text": text}) for text in documents]
    suffix = "txt" if form == "lines" else "jsonl"
    (folder / "texts").mkdir()
    for name, some in (("a", lines[:30]), ("b", lines[30:])):
        (folder / "texts" / f"{name}.{suffix}").write_text("\n".join(some) + "\n\n")
    encoded = [[WORDS[word] for word in text.split()] if tokenized else text.encode() for text in documents]
    end = WORDS["</s>"] if tokenized else 259
    expected = [token for tokens in encoded for token in (*tokens, end)]
    settings = {"tokenizer": str(tokenizer)} if tokenized else {}
    train = assembled(data=f"{form}:texts", sequence_length=16, validation_split=0, **settings).train
    assert len(train) == (len(expected) - 1) // 16
    batch = whole(train)
    inputs, targets = batch.inputs[0].flatten().tolist(), batch.targets.flatten().tolist()
    assert inputs == expected[: len(inputs)] and inputs.count(end) > 10
    following = expected[1 : len(inputs) + 1]
    assert targets == [IGNORED if shown == end else token for shown, token in zip(inputs, following)]
    if form == "lines":  # the cache keeps the two apart
        assert len(Tokens("texts", **settings)) != len(Tokens("texts", documents="lines", **settings))
    assert same_batch(train.batch([1], [0]), batch.split(len(train))[1])


def test_documents_that_cannot_be_read(folder):
    for name, content, form, says in (
        ("list.jsonl", b'{"text": "one"}\n[1]\n', "jsonl", "line 2 of 'list.jsonl' is not a JSON object"),
        ("cut.jsonl", b'\n{"text": "on', "jsonl", "line 2 of 'cut.jsonl'"),
        ("number.jsonl", b'{"text": 3}', "jsonl", "line 1 of 'number.jsonl'"),
        ("latin.txt", b"one\n\xe9", "lines", "'latin.txt' is not UTF-8"),
        ("blank.txt", b"\n \n", "lines", "gives no tokens"),
    ):
        (folder / name).write_bytes(content)
        assert_config_refused(says, data=f"{form}:{name}")
    (folder / "half.jsonl").write_text('{"text": "a\\ud800b"}\n' * 9)
    assert assembled(data="jsonl:half.jsonl").train
