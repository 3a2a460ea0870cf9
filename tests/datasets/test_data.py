"""Tests of samples and their order: none is lost or repeated, on any number of ranks. Images and volumes with their labels."""

import gc
import threading
import traceback
from itertools import islice

import horovod.torch as hvd
import numpy
import pytest
import torch
from batches import assert_refused, same_batch, whole
from hypothesis import given, settings, strategies as st
from PIL import Image

from hvd_ckpt.app.datasets.images import Digits, ImageArrays, ImageFolder, open_images
from hvd_ckpt.app.datasets.volumes import Ellipsoids, VolumeArrays, open_volumes
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.data.sampler import DataLoader, DistributedSampler, batches_of_rank


class Counted:
    """Samples that are their own numbers, with their epochs as targets."""

    def __init__(self, samples, fails_at=None):
        self.samples, self.fails_at, self.made = samples, fails_at, 0

    def __len__(self):
        return self.samples

    def batch(self, indices, epoch):
        self.made += 1
        if self.made == self.fails_at:
            raise RuntimeError("this sample is broken")
        return Batch((torch.tensor(indices),), torch.tensor(epoch))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hvd_ckpt loader")]


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 40),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    batch=st.integers(1, 6),
    size=st.integers(1, 5),
)
def test_ranks_share_out_every_sample_once_in_each_epoch(samples, epochs, seed, batch, size):
    order = DistributedSampler(samples, seed=seed, epochs=epochs)
    length, count = samples * epochs, batch * size
    assert order.length == length
    loaded = [list(batches_of_rank(Counted(samples), order, batch, rank, size)) for rank in range(size)]
    assert not loader_threads()
    seen = []
    for position, of_ranks in zip(range(0, length, count), zip(*loaded, strict=True), strict=True):
        of_one = list(zip(*order.part(position, count, 0, 1)))
        assert len(of_one) == min(count, length - position)
        for rank, (((part, number),), after) in enumerate(of_ranks):
            pairs = list(zip(part.inputs[0].tolist(), part.targets.tolist()))
            # Independent of the number of ranks; one without a sample has the first, which does not count.
            assert pairs == (of_one[rank::size] or of_one[:1]) and number == len(of_one[rank::size])
            assert after == position + len(of_one)
        seen += of_one
    assert sorted(seen) == [(sample, epoch) for sample in range(samples) for epoch in range(epochs)]
    assert [epoch for _, epoch in seen] == sorted(epoch for _, epoch in seen)
    assert order.part(length, count, 0, size) == ([], [])


def test_the_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        return tuple(DistributedSampler(100, seed=seed).part(100 * epoch, 100, 0, 1)[0])

    assert order(0, 0) == order(0, 0)
    assert len({order(seed, epoch) for seed in (0, 1, 2**32, 2**32 + 1) for epoch in range(3)}) == 12


def sampler(ranks=1, rank=0, **options):
    return DistributedSampler(range(20), 2, ranks, rank, seed=4, epochs=2, **options)


def test_a_sampler_resumes_at_its_position_on_any_number_of_ranks():
    order = sampler().part(0, 40, 0, 1)[0]
    first = [sampler(3, rank) for rank in range(3)]
    assert [len(one) for one in first] == [6] * 3  # 36 of 40 samples
    batches = islice(zip(*first), 3)
    assert [number for batch in batches for pair in zip(*batch) for number in pair] == order[:18]
    seen = []
    for rank in range(2):
        other = sampler(2, rank)
        other.load_state_dict(first[0].state_dict())  # of the batch that the loop has
        seen += [number for batch in other for number in batch]
        assert other.position == 38 and list(other) == []
    assert sorted(seen) == sorted(order[18:38])
    assert sampler(shuffle=False).part(15, 10, 0, 1) == ([*range(15, 20), *range(5)], [0] * 5 + [1] * 5)


def test_wrong_arguments_and_states_of_a_sampler_are_refused(monkeypatch):
    assert_refused("no samples", DistributedSampler, 0)
    assert_refused("num_replicas must be a number from 1", sampler, 0)
    for state in ({"seed": 5}, {"samples": 21}, {"shuffle": 0}):
        assert_refused("give the same data, seed and shuffle", sampler().load_state_dict, state)
    for state in ({}, {"position": -1}, {"position": "18"}):
        assert_refused("which must be a number from 0", sampler().load_state_dict, state)
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(hvd, "rank", lambda: 2)
    assert_refused("got 2 of 2", DistributedSampler, 20, num_replicas=2)


# --------------------------------------------------------------------------------------------- loader


def test_a_loader_ends_its_thread_when_it_fails_is_closed_or_is_dropped():
    def loader(data):
        return batches_of_rank(data, DistributedSampler(10), 2, 0, 1)

    failing = loader(Counted(10, fails_at=3))
    assert [next(failing)[1], next(failing)[1]] == [2, 4]
    with pytest.raises(RuntimeError, match="this sample is broken") as caught:
        next(failing)
    assert "in batch" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(failing) == [] and not loader_threads()
    data = Counted(10)
    closed, dropped = loader(data), loader(data)
    next(closed)
    closed.close()
    assert data.made <= 4 and not loader_threads() and list(closed) == []
    next(dropped)
    (thread,) = loader_threads()
    del dropped
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_knows_what_the_loop_has_got_and_draws_nothing(workers):
    def loader():
        return DataLoader(range(30), DistributedSampler(30, 2, 1, 0, epochs=1), num_workers=workers)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    expected = [batch.tolist() for batch in loader()]
    assert torch.equal(torch.get_rng_state(), state) and len(expected) == len(loader()) == 15
    one, other = loader(), loader()
    for number, batch in enumerate(islice(one, 4), start=1):
        assert one.state_dict()["position"] == 2 * number and batch.tolist() == expected[number - 1]
    other.load_state_dict(one.state_dict())
    assert [batch.tolist() for batch in other] == expected[4:]
    assert_refused("give an hc.data.DistributedSampler", DataLoader, range(3), [[0, 1]], error=TypeError)


# ------------------------------------------------------------------------------------ images, volumes


def write_npz(path, **arrays):
    numpy.savez(path, **arrays)
    return path


def test_digits_are_divided_and_standardised_by_those_trained_on():
    training, evaluation = Digits(8, seed=1).split(0.2)
    assert (len(training), len(evaluation)) == (1438, 359)
    batch = whole(training)
    assert abs(batch.inputs[0].mean()) < 1e-6 and abs(batch.inputs[0].std() - 1) < 1e-3
    images = (*batch.inputs[0], *whole(evaluation).inputs[0])
    assert len({image.numpy().tobytes() for image in images}) == 1797
    assert batch.targets.dtype == torch.int64 and set(batch.targets.tolist()) == set(range(10))
    assert same_batch(Digits(8, seed=1).split(0.2)[0].batch([3], [0]), training.batch([3], [0]))
    large = Digits(16).batch([0, 7], [0, 0]).inputs[0]
    assert large.shape == (2, 1, 16, 16) and large.dtype == torch.float32


def test_image_arrays_come_in_every_layout(tmp_path):
    images = numpy.random.default_rng(0).integers(0, 255, (5, 6, 6, 3), dtype=numpy.uint8)
    labels = numpy.array([0, 1, 2, 1, 0])
    good = write_npz(tmp_path / "a.npz", images=images, labels=labels)
    last, first = open_images(str(good), 6), ImageArrays((numpy.moveaxis(images, 3, 1), labels))
    assert same_batch(last.batch([1, 4], [0, 0]), first.batch([1, 4], [0, 0]))
    assert (last.channels, last.classes) == (3, 3)
    assert ImageArrays((images[..., 0], labels), 12).batch([0], [0]).inputs[0].shape == (1, 1, 12, 12)
    path = tmp_path / "wrong.npz"
    for says, wrong in (
        ("labels", {"labels": labels[:4]}),
        ("-1", {"labels": labels - 1}),
        ("float64", {"labels": labels / 2}),
        ("(5, 6, 6, 2)", {"images": images[:, :, :, :2]}),
        ("not finite", {"images": images.astype(float) * numpy.nan}),
        ("Python objects", {"labels": labels.astype(object)}),
    ):
        assert_refused(says, ImageArrays, write_npz(path, **{"images": images, "labels": labels, **wrong}))
    assert_refused("labels", ImageArrays, write_npz(path, images=images))
    for content in (b"", good.read_bytes()[:200]):
        path.write_bytes(content)
        assert_refused("wrong.npz", ImageArrays, path)
    assert_refused("No such file", open_images, tmp_path / "missing", 6)


def test_a_folder_of_images_has_a_class_for_each_folder(tmp_path):
    folder = tmp_path / "images"
    colours = {"red/1.png": (255, 0, 0), "red/deep/2.PNG": (250, 0, 0), "blue/3.jpg": (0, 0, 255)}
    for name, colour in colours.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), colour).save(folder / name)
    (folder / "red" / "notes.txt").write_text("no image")
    data = open_images(folder, 8)
    assert isinstance(data, ImageFolder) and data.class_names == ["blue", "red"]
    batch = whole(data)
    assert batch.targets.tolist() == [0, 1, 1] and batch.inputs[0].shape == (3, 3, 8, 8)
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert torch.allclose(batch.inputs[0][1, :, 0, 0], red)
    (folder / "blue" / "3.jpg").write_bytes(b"no image")
    assert_refused("3.jpg", data.batch, [0], [0])
    (folder / "green").mkdir()
    assert_refused("green' holds no images", ImageFolder, folder, 8)
    assert_refused("no folders", ImageFolder, folder / "green", 8)
    assert_refused("No such file", ImageFolder, tmp_path / "missing", 8)


def test_ellipsoids_are_brighter_than_what_is_around_them():
    data = Ellipsoids(16, samples=40, seed=1)
    batch = whole(data)
    volumes, labels = batch.inputs[0], batch.targets
    assert volumes.shape == (40, 1, 16, 16, 16) and labels.shape == (40, 16, 16, 16)
    inside = labels.double().mean((1, 2, 3))
    assert (inside > 0).all() and (inside < 0.2).all() and len(set(inside.tolist())) > 30
    for volume, label in zip(volumes[:, 0], labels):
        assert volume[label == 1].mean() > volume[label == 0].mean() + 0.5
        assert abs(volume.mean()) < 1e-4 and abs(volume.std() - 1) < 1e-2
    assert same_batch(data.batch([3], [0]), data.batch([3], [9]))  # a fixed data set
    training, evaluation = data.split(0.25)
    assert len(training) == 30
    assert same_batch(evaluation.batch([0], [0]), data.batch([30], [0]))
    assert open_volumes(None, 8).batch([0], [0]).inputs[0].shape == (1, 1, 8, 8, 8)


def test_volumes_of_a_file_are_scaled_with_their_labels(tmp_path):
    labels = numpy.random.default_rng(0).integers(0, 3, (4, 4, 5, 6), dtype=numpy.uint8)
    volumes = 10 * labels + 100.0
    data = open_volumes(write_npz(tmp_path / "v.npz", volumes=volumes, labels=labels), 12)
    batch = data.batch([0, 3], [0, 0])
    assert batch.inputs[0].shape == (2, 1, 12, 12, 12) and batch.targets.shape == (2, 12, 12, 12)
    assert (data.channels, data.classes) == (1, 3)
    plain = whole(VolumeArrays((volumes, labels)))
    assert plain.targets.tolist() == labels.tolist() and abs(plain.inputs[0].mean()) < 1e-5
    kept, held = map(whole, VolumeArrays((volumes, labels)).split(0.5))
    assert sorted([*kept.targets.tolist(), *held.targets.tolist()]) == sorted(labels.tolist())
    assert abs(kept.inputs[0].mean()) < 1e-5 < abs(held.inputs[0].mean())
    assert_refused("(N, D, H, W)", VolumeArrays, (volumes, labels[:, :2]))
    huge = write_npz(tmp_path / "huge.npz", volumes=volumes, labels=numpy.full(labels.shape, 2**40))
    assert_refused("1099511627776", open_volumes, huge, 4)
