"""Tests of samples and their order: none is lost or repeated, on any number of ranks, and masks are right."""

from __future__ import annotations

import functools
import gc
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from snapshot_files import file_size_limit
from tokenizers import Tokenizer, models, pre_tokenizers

from hvd_ckpt.app.datasets.images import Digits, ImageArrays, ImageFolder, open_images
from hvd_ckpt.app.datasets.text import IGNORED, CausalText, MaskedText, PermutedText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.datasets.volumes import Ellipsoids, VolumeArrays, open_volumes
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.data.sampler import DataLoader, DistributedSampler, batches_of_rank

SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(numpy.random.default_rng(0).integers(32, 127, 20_000, dtype=numpy.uint8).tobytes())
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "the": 2, "cat": 3, "sat": 4, "</s>": 5}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    """What the call says is wrong, which must be one line."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(
        (*one.inputs, one.targets, *one.shared.values()),
        (*other.inputs, other.targets, *other.shared.values()),
    )
    return all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------------------- order


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_ranks_share_out_every_sample_once_in_each_epoch(data: st.DataObject) -> None:
    samples, epochs, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), data.draw(SEEDS)
    batch, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    order = DistributedSampler(samples, seed=seed, epochs=epochs)
    count = batch * size
    seen = []
    for position in range(0, samples * epochs, count):
        parts = [list(zip(*order.part(position, count, rank, size))) for rank in range(size)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        whole = [parts[at % size][at // size] for at in range(sum(map(len, parts)))]
        assert whole == list(zip(*order.part(position, count, 0, 1)))  # independent of the number of ranks
        assert len(whole) == min(count, samples * epochs - position)
        seen += whole
    assert sorted(seen) == [(sample, epoch) for sample in range(samples) for epoch in range(epochs)]
    assert [epoch for _, epoch in seen] == sorted(epoch for _, epoch in seen)
    assert order.length == samples * epochs
    assert order.part(samples * epochs, count, 0, size) == ([], [])


def test_the_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return DistributedSampler(100, seed=seed).part(100 * epoch, 100, 0, 1)[0]

    assert order(0, 0) == order(0, 0)
    orders = [order(seed, epoch) for seed in (0, 1, 2**32, 2**32 + 1) for epoch in range(3)]
    assert len({tuple(one) for one in orders}) == 12
    assert "no samples" in message(ValueError, lambda: DistributedSampler(0))


def test_a_position_counts_the_batch_that_the_loop_has() -> None:
    sampler = DistributedSampler(10, 2, num_replicas=2, rank=1, epochs=1)
    assert [sampler.state_dict()["position"] for _ in sampler] == [4, 8]


# ------------------------------------------------------------------------------------------- tokens


def test_one_file_of_bytes_is_mapped_as_it_is(text: Path, tmp_path: Path) -> None:
    tokens = Tokens(text, cache=tmp_path / "cache")
    assert tokens.array.tobytes() == text.read_bytes() and not (tmp_path / "cache").exists()
    assert isinstance(tokens.array.base, numpy.memmap) and not tokens.array.flags.writeable
    special = {tokens.mask, tokens.padding, tokens.start, tokens.separator}
    assert special == {256, 257, 258, 259} and tokens.vocabulary == 260 and tokens.ordinary == 256


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    for name, content in {
        "b.txt": b"two", "a/z.md": b"one", "c.PY": b"\xff\x00", "d.bin": b"no", ".hidden.txt": b"no", ".git/e.txt": b"no",
        "empty.txt": b"",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (tmp_path / "outside.txt").write_text("no")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "loop").symlink_to(folder)
    tokens = Tokens(folder, cache=cache)
    between = [tokens.separator]
    assert tokens.array.tolist() == [*b"one", *between, *b"two", *between, 255, 0]


def test_a_cache_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))
    Tokens(text, tokenizer, cache=tmp_path / "cache")
    assert calls == ["fsync", "replace"]


def test_a_cache_is_found_again_until_something_changes(
    tmp_path: Path, text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "hvd_ckpt" / "tokens"
    text.write_text("the cat sat\n" * 3_000)
    first = Tokens(text, tokenizer).array.copy()
    (file,) = cache.iterdir()
    made = file.stat().st_mtime_ns
    assert numpy.array_equal(Tokens(text, tokenizer).array, first) and file.stat().st_mtime_ns == made
    text.write_text("the cat\n" * 3_000)
    assert len(Tokens(text, tokenizer)) == 6_000
    assert len(list(cache.iterdir())) == 2
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"one")
    (folder / "b.txt").write_bytes(b"two")
    with ThreadPoolExecutor(8) as pool:  # several at once
        arrays = list(pool.map(lambda _: Tokens(folder).array, range(8)))
    expected = [*b"one", 259, *b"two"]
    assert all(array.tolist() == expected for array in arrays)
    assert len(list(cache.iterdir())) == 3
    text.write_text("cat\n" * 3_000)
    with file_size_limit(100):  # as on a full disk, which is that of the cache
        assert str(cache) in message(ValueError, lambda: Tokens(text, tokenizer))
    assert len(list(cache.iterdir())) == 3


def test_a_tokenizer_encodes_whole_text_and_its_special_tokens_are_known(
    tmp_path: Path, text: Path, tokenizer: Path
) -> None:
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
    assert "not UTF-8" in message(ValueError, lambda: Tokens(text, tokenizer, cache=tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-made is left


def test_missing_or_unusable_text_is_an_error(tmp_path: Path, text: Path, tokenizer: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b"  \n")
    (tmp_path / "folder").mkdir()
    for wrong, says in (("missing", "No such file"), ("empty", "is empty"), ("folder", "holds no text")):
        assert says in message(ValueError, lambda wrong=wrong: Tokens(tmp_path / wrong))
    assert "neither" in message(ValueError, lambda: Tokens("/dev/null"))
    assert "no tokens" in message(
        ValueError, lambda: Tokens(tmp_path / "blank", tokenizer, cache=tmp_path / "cache")
    )
    assert "No such file" in message(ValueError, lambda: Tokens(text, tmp_path / "missing"))
    assert "not a JSON file of the tokenizers library" in message(ValueError, lambda: Tokens(text, text))
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(1 << 40)
    assert "1,099,511,627,776 bytes" in message(ValueError, lambda: Tokens(text, tmp_path / "huge.json"))
    for name in "a.txt", "b.txt":
        with (tmp_path / "folder" / name).open("wb") as huge:
            huge.truncate(1 << 43)
    sparse = functools.partial(Tokens, tmp_path / "folder", cache=tmp_path / "cache")
    assert "35,184,372,088,834 bytes" in message(ValueError, sparse)
    (tmp_path / "taken").write_text("no folder")
    assert "taken" in message(ValueError, lambda: Tokens(text, tokenizer, cache=tmp_path / "taken"))
    for kind in (CausalText, MaskedText, PermutedText):
        assert "less than two samples" in message(ValueError, lambda kind=kind: kind(Tokens(text), 10_001))


def test_no_folder_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "class" / "locked").mkdir(parents=True)
    for name in ("a.txt", "a.png"):
        (tmp_path / "class" / name).write_text("a")
    assert len(Tokens(tmp_path, cache=tmp_path)) == len(ImageFolder(tmp_path, 8)) == 1
    monkeypatch.setattr(os, "scandir", refusing)
    for read in (Tokens, lambda folder: ImageFolder(folder, 8)):
        assert "Permission denied" in message(ValueError, lambda read=read: read(tmp_path))


def test_without_a_text_it_is_the_standard_library(tmp_path: Path) -> None:
    tokens = Tokens(cache=tmp_path)
    assert len(tokens) > 1 << 20
    assert b"import" in tokens.array[: 1 << 16].astype(numpy.uint8).tobytes()


# --------------------------------------------------------------------------------------- text samples


def test_causal_text_is_every_token_and_the_one_after_it(text: Path) -> None:
    data = CausalText(Tokens(text), 100)
    batch = data.batch(range(len(data)), [0] * len(data))
    written = list(text.read_bytes())
    assert batch.inputs[0].dtype == batch.targets.dtype == torch.int64 and len(data) == 199
    assert batch.inputs[0].flatten().tolist() == written[:19900]
    assert batch.targets.flatten().tolist() == written[1:19901]


def test_the_end_of_the_text_is_held_out(text: Path) -> None:
    data = MaskedText(Tokens(text), 100, seed=1)
    training, evaluation = data.split(0.1)
    assert evaluation is not None and (len(training), len(evaluation)) == (180, 20)
    assert same(training.batch([179], [2]), data.batch([179], [2]))
    assert same(evaluation.batch([0, 19], [2, 2]), data.batch([180, 199], [2, 2]))
    nothing = data.split(0)
    assert len(nothing[0]) == 200 and nothing[1] is None
    for indices in ([20], [-1]):
        message(IndexError, lambda indices=indices: evaluation.batch(indices, [0]))
    message(ValueError, lambda: data.batch([0, 1], [0]))


def test_masked_text_hides_as_bert_does(text: Path) -> None:
    tokens = Tokens(text)
    data = MaskedText(tokens, 100, seed=1)
    batch = data.batch(range(200), [0] * 200)
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
def test_random_numbers_depend_on_seed_epoch_and_sample_only(kind: Any, text: Path) -> None:
    tokens = Tokens(text)
    data = kind(tokens, 100, seed=1)
    whole = data.batch([7, 3, 7, 7], [0, 1, 2, 0])
    alone = [data.batch([sample], [epoch]) for sample, epoch in ((7, 0), (3, 1), (7, 2), (7, 0))]
    assert all(same(part, one) for part, one in zip(whole.split(4), alone))
    assert not same(alone[0], alone[2])
    assert not same(alone[0], kind(tokens, 100, seed=2).batch([7], [0]))


def test_permuted_text_predicts_spans_in_every_order(text: Path) -> None:
    data = PermutedText(Tokens(text), 60, seed=1)
    batch = data.batch(range(300), [0] * 300)
    mapping, hidden = batch.shared["target_mapping"], batch.shared["perm_mask"]
    assert mapping.shape == (300, 10, 60) and hidden.shape == (300, 60, 60)
    assert mapping.dtype == hidden.dtype == torch.float32 and (mapping.sum(2) == 1).all()
    places = mapping.argmax(2)
    assert torch.equal(batch.inputs[0].gather(1, places), batch.targets) and (places.diff() > 0).all()
    asked = mapping.sum(1)
    assert (asked.sum(1) == 10).all() and (asked.sum(0) > 10).all()  # 50 on average, fewer at the ends
    starts = (asked - torch.nn.functional.pad(asked, (1, 0))[:, :-1]).clamp(min=0).sum()
    assert 2.4 < asked.sum() / starts < 3.1  # spans of 3 on average, but for the cut of the last
    context = asked == 0
    for seen, is_context, predicted in zip(1 - hidden, context, places):
        assert seen[:, is_context].all() and not seen[is_context][:, predicted].any()
        # Among themselves: each sees those before it, so the first none and the last all but itself.
        among = seen[predicted][:, predicted]
        assert sorted(among.sum(1).tolist()) == list(range(10))
    first = (1 - hidden).sum(2).gather(1, places).argmin(1)
    assert len(set(first.tolist())) == 10


# ------------------------------------------------------------------------------------ images, volumes


def write_npz(path: Path, **arrays: numpy.ndarray) -> Path:
    numpy.savez(path, **arrays)
    return path


def test_digits_are_divided_and_standardised_by_those_trained_on() -> None:
    training, evaluation = Digits(8, seed=1).split(0.2)
    assert evaluation is not None and (len(training), len(evaluation)) == (1438, 359)
    batch, validation = training.batch(range(1438), [0] * 1438), evaluation.batch(range(359), [0] * 359)
    assert abs(batch.inputs[0].mean()) < 1e-6 and abs(batch.inputs[0].std() - 1) < 1e-3
    assert len({image.numpy().tobytes() for image in (*batch.inputs[0], *validation.inputs[0])}) == 1797
    assert batch.targets.dtype == torch.int64 and set(batch.targets.tolist()) == set(range(10))
    assert same(Digits(8, seed=1).split(0.2)[0].batch([3], [0]), training.batch([3], [0]))
    large = Digits(16).batch([0, 7], [0, 0]).inputs[0]
    assert large.shape == (2, 1, 16, 16) and large.dtype == torch.float32


def test_image_arrays_come_in_every_layout(tmp_path: Path) -> None:
    images = numpy.random.default_rng(0).integers(0, 255, (5, 6, 6, 3), dtype=numpy.uint8)
    labels = numpy.array([0, 1, 2, 1, 0])
    last = open_images(str(write_npz(tmp_path / "a.npz", images=images, labels=labels)), 6)
    first = ImageArrays((numpy.moveaxis(images, 3, 1), labels))
    assert same(last.batch([1, 4], [0, 0]), first.batch([1, 4], [0, 0]))
    assert (last.channels, last.classes) == (3, 3)
    assert ImageArrays((images[..., 0], labels), 12).batch([0], [0]).inputs[0].shape == (1, 1, 12, 12)
    for wrong, says in (
        ({"labels": labels[:4]}, "labels"),
        ({"labels": labels - 1}, "-1"),
        ({"labels": labels / 2}, "float64"),
        ({"images": images[:, :, :, :2]}, "(5, 6, 6, 2)"),
        ({"images": images.astype(float) * numpy.nan}, "not finite"),
        ({"labels": labels.astype(object)}, "Python objects"),
    ):
        path = write_npz(tmp_path / "wrong.npz", **{"images": images, "labels": labels, **wrong})
        assert says in message(ValueError, lambda path=path: ImageArrays(path))
    write_npz(path, images=images)
    assert "labels" in message(ValueError, lambda: ImageArrays(path))
    for content in (b"", (tmp_path / "a.npz").read_bytes()[:200]):
        path.write_bytes(content)
        message(ValueError, lambda: ImageArrays(path))
    assert "No such file" in message(ValueError, lambda: open_images(tmp_path / "missing", 6))


def test_a_folder_of_images_has_a_class_for_each_folder(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for name, colour in (
        ("red/1.png", (255, 0, 0)),
        ("red/deep/2.PNG", (250, 0, 0)),
        ("blue/3.jpg", (0, 0, 255)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), colour).save(folder / name)
    (folder / "red" / "notes.txt").write_text("no image")
    data = open_images(folder, 8)
    assert isinstance(data, ImageFolder) and data.class_names == ["blue", "red"] and len(data) == 3
    batch = data.batch([0, 1, 2], [0, 0, 0])
    assert batch.targets.tolist() == [0, 1, 1] and batch.inputs[0].shape == (3, 3, 8, 8)
    assert torch.allclose(
        batch.inputs[0][1, :, 0, 0], torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    )
    (folder / "blue" / "3.jpg").write_bytes(b"no image")
    assert "3.jpg" in message(ValueError, lambda: data.batch([0], [0]))
    (folder / "green").mkdir()
    assert "green' holds no images" in message(ValueError, lambda: ImageFolder(folder, 8))
    assert "no folders" in message(ValueError, lambda: ImageFolder(folder / "green", 8))
    assert "No such file" in message(ValueError, lambda: ImageFolder(tmp_path / "missing", 8))


def test_ellipsoids_are_brighter_than_what_is_around_them() -> None:
    data = Ellipsoids(16, samples=40, seed=1)
    batch = data.batch(range(40), [0] * 40)
    volumes, labels = batch.inputs[0], batch.targets
    assert volumes.shape == (40, 1, 16, 16, 16) and labels.shape == (40, 16, 16, 16)
    inside = labels.double().mean((1, 2, 3))
    assert (inside > 0).all() and (inside < 0.2).all() and len(set(inside.tolist())) > 30
    for volume, label in zip(volumes[:, 0], labels):
        assert volume[label == 1].mean() > volume[label == 0].mean() + 0.5
        assert abs(volume.mean()) < 1e-4 and abs(volume.std() - 1) < 1e-2
    assert same(data.batch([3], [0]), data.batch([3], [9]))  # a fixed data set
    training, evaluation = data.split(0.25)
    assert evaluation is not None and len(training) == 30
    assert same(evaluation.batch([0], [0]), data.batch([30], [0]))
    assert open_volumes(None, 8).batch([0], [0]).inputs[0].shape == (1, 1, 8, 8, 8)


def test_volumes_of_a_file_are_scaled_with_their_labels(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    labels = random.integers(0, 3, (4, 4, 5, 6), dtype=numpy.uint8)
    volumes = 10 * labels + 100.0
    data = open_volumes(write_npz(tmp_path / "v.npz", volumes=volumes, labels=labels), 12)
    batch = data.batch([0, 3], [0, 0])
    assert batch.inputs[0].shape == (2, 1, 12, 12, 12) and batch.targets.shape == (2, 12, 12, 12)
    assert (data.channels, data.classes) == (1, 3)
    plain = VolumeArrays((volumes, labels)).batch(range(4), [0] * 4)
    assert plain.targets.tolist() == labels.tolist() and abs(plain.inputs[0].mean()) < 1e-5
    training, evaluation = VolumeArrays((volumes, labels)).split(0.5)
    assert evaluation is not None
    kept, held = training.batch([0, 1], [0, 0]), evaluation.batch([0, 1], [0, 0])
    assert sorted([*kept.targets.tolist(), *held.targets.tolist()]) == sorted(labels.tolist())
    assert abs(kept.inputs[0].mean()) < 1e-5 < abs(held.inputs[0].mean())
    assert "(N, D, H, W)" in message(ValueError, lambda: VolumeArrays((volumes, labels[:, :2])))
    huge = write_npz(tmp_path / "huge.npz", volumes=volumes, labels=numpy.full(labels.shape, 2**40))
    assert "1099511627776" in message(ValueError, lambda: open_volumes(huge, 4))


# --------------------------------------------------------------------------------------------- loader


class Counted:
    """Samples that are their own numbers."""

    def __init__(self, samples: int, fails_at: int | None = None) -> None:
        self.samples = samples
        self.fails_at = fails_at
        self.made = 0

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        self.made += 1
        if self.made == self.fails_at:
            raise RuntimeError("this sample is broken")
        return Batch((torch.tensor(indices),), torch.tensor(epoch))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hvd_ckpt loader")]


def test_a_loader_gives_each_rank_its_part_up_to_the_short_end() -> None:
    data: Dataset = Counted(10)
    order = DistributedSampler(10, seed=5, epochs=2)
    seen: list[int] = []
    counts = []
    for rank in range(4):
        loaded = list(batches_of_rank(data, order, 2, rank, 4))
        assert [position for _, position in loaded] == [8, 16, 20]
        parts = [part for (part,), _ in loaded]
        counts.append([samples for _, samples in parts])
        seen += [number for batch, samples in parts for number in batch.inputs[0][:samples].tolist()]
        first = order.part(16, 1, 0, 1)[0]
        assert all(batch.inputs[0].tolist() == first for batch, samples in parts if not samples)
    assert sorted(seen) == sorted(2 * list(range(10)))
    assert counts == [[2, 2, 1]] * 4
    loaded = list(batches_of_rank(data, DistributedSampler(10, seed=5, epochs=1), 2, 3, 4))
    parts = [part for (part,), _ in loaded]
    assert [samples for _, samples in parts] == [2, 0] and len(parts[1][0]) == 1
    assert not loader_threads()


def test_an_error_in_the_thread_is_raised_where_batches_are_asked_for() -> None:
    loader = batches_of_rank(Counted(10, fails_at=3), DistributedSampler(10), 2, 0, 1)
    assert [next(loader)[1], next(loader)[1]] == [2, 4]
    with pytest.raises(RuntimeError, match="this sample is broken") as caught:
        next(loader)
    assert "in batch" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(loader) == []
    assert not loader_threads()


def test_a_loader_that_is_closed_or_dropped_ends_its_thread() -> None:
    data = Counted(10)
    loader = batches_of_rank(data, DistributedSampler(10), 2, 0, 1)
    next(loader)
    loader.close()
    assert data.made <= 4 and not loader_threads() and list(loader) == []
    loader = batches_of_rank(data, DistributedSampler(10), 2, 0, 1)
    next(loader)
    (thread,) = loader_threads()
    del loader
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_sampler_resumes_at_its_position_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(ranks: int, rank: int, **options: Any) -> DistributedSampler:
        return DistributedSampler(range(20), 2, ranks, rank, seed=4, epochs=2, **options)

    order = sampler(1, 0).part(0, 40, 0, 1)[0]
    first = [sampler(3, rank) for rank in range(3)]
    batches = list(zip(*(iter(one) for one in first)))[:3]
    assert [len(one) for one in first] == [6] * 3  # 36 of 40 samples
    taken = [number for batch in batches for pair in zip(*batch) for number in pair]
    assert taken == order[:18]
    state = {**first[0].state_dict(), "position": 18}
    seen = []
    for rank in range(2):
        other = sampler(2, rank)
        other.load_state_dict(state)
        seen.append([number for batch in other for number in batch])
        assert other.position == 38 and list(other) == []
    assert sorted(number for one in seen for number in one) == sorted(order[18:38])
    assert sampler(1, 0, shuffle=False).part(15, 10, 0, 1) == ([*range(15, 20), *range(5)], [0] * 5 + [1] * 5)
    for wrong in ({"seed": 5}, {"samples": 21}, {"shuffle": 0}):
        assert "give the same data, seed and shuffle" in message(
            ValueError, lambda wrong=wrong: sampler(1, 0).load_state_dict({**state, **wrong})
        )
    for wrong in ({}, {"position": -1}, {"position": "18"}):
        assert "which must be a number from 0" in message(
            ValueError, lambda wrong=wrong: sampler(1, 0).load_state_dict(wrong)
        )
    assert "num_replicas must be a number from 1" in message(ValueError, lambda: sampler(0, 0))
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(hvd, "rank", lambda: 2)
    assert "got 2 of 2" in message(ValueError, lambda: DistributedSampler(20, num_replicas=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_knows_what_the_loop_has_got_and_draws_nothing(workers: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(30), DistributedSampler(30, 2, 1, 0, epochs=1), num_workers=workers)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    whole = [batch.tolist() for batch in loader()]
    assert torch.equal(torch.get_rng_state(), state) and len(whole) == len(loader()) == 15
    one, other = loader(), loader()
    for number, batch in enumerate(one, start=1):
        assert one.state_dict()["position"] == 2 * number and batch.tolist() == whole[number - 1]
        if number == 4:
            break
    other.load_state_dict(one.state_dict())
    assert [batch.tolist() for batch in other] == whole[4:]
    assert "give an hc.data.DistributedSampler" in message(TypeError, lambda: DataLoader(range(3), [[0, 1]]))
