"""Tests of which files a rank reads when it resumes with its weights in shards: those with elements of its own."""

import shutil
from pathlib import Path

import pytest
import torch
from same import assert_same, whole_weights
from sharded import distribute
from snapshot_files import divided, read_snapshot, resume, save, write_ranks
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.snapshots import training_state
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import check_fits, optimizer_values
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import Snapshot, open_snapshot
from hvd_ckpt.snapshots.schema import tensors_file

pytestmark = pytest.mark.ranks(gloo=(2, 3, 4))

STEP = Path("snapshots", "step-00000001")


class Model(nn.Module):
    """Two names for one weight, a frozen layer that lies channels last, half precision, no elements, and buffers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(24, 16)
        self.images = nn.Conv2d(1, 16, 3, padding=1)
        self.frozen = nn.Conv2d(16, 8, 3).requires_grad_(False)
        self.frozen.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(16)
        self.bfloats = nn.Parameter(torch.randn(37).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers):
        hidden = self.norm(self.tokens(numbers))
        images = self.frozen(self.images(hidden.view(-1, 1, 4, 4)))
        return self.head(hidden).square().mean() + images.mean() + self.bfloats.float().sum()


def made(seed, **options):
    model = Model(seed)
    bare = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, distribute(bare, model.named_parameters(), model=model, **options)


def train(model, optimizer):
    """A step, the same on all ranks, whose buffers are then equal: other ranks resume with those of the first."""
    optimizer.zero_grad()
    model(torch.arange(12)).backward()
    optimizer.step()


def saved(folder, seed=0, **options):
    """The state that a run has written after a step, and its state after the next one."""
    model, optimizer = made(seed, **options)
    train(model, optimizer)
    save(folder, model, optimizer)
    written = state_of(model, optimizer)
    train(model, optimizer)
    return written, state_of(model, optimizer)


def state_of(model, optimizer):
    """Weights and buffers, whole."""
    return {**whole_weights(model, optimizer), **{name: one.clone() for name, one in model.named_buffers()}}


def resumed(folder, monkeypatch, **options):
    """A model that has resumed, its optimizer, and the names of the tensor files that this rank has read."""
    names, unspied = set(), Snapshot.open_file

    def spying(files, rank):
        names.add(tensors_file(rank))
        return unspied(files, rank)

    model, optimizer = made(1, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "open_file", spying)
        resume(folder, model, optimizer)
    return model, optimizer, names


def all_files():
    return {tensors_file(rank) for rank in range(hc.size())}


def divide(path, folder, ranks):
    """Writes a snapshot of this one's state as so many ranks would, with equal parts of all tensors. For one rank to call."""
    found = read_snapshot(path, 0)
    manifest = found.manifest
    wanted = [manifest.all_of(name) for name in manifest.tensors]
    whole = [one._replace(values=values) for one, values in zip(wanted, found.read(wanted))]
    values = optimizer_values(found, manifest.names("weights").keys() - dict(Model(0).named_buffers()))
    per_rank = {**found.per_rank, "optimizer": values}
    states = [
        SavedState(found.replicated, per_rank, divided(whole, rank, ranks), manifest.aliases, manifest.layout)
        for rank in range(ranks)
    ]
    assert open_snapshot(write_ranks(folder / "snapshots", 1, states)).manifest.ranks == ranks


@pytest.mark.parametrize("options", [{}, {"shard": 1}, {"shard": 2, "wire": "bf16"}, {"shard": 3}], ids=str)
def test_a_rank_reads_the_files_that_have_elements_of_its_own(folder, monkeypatch, options):
    written, after = saved(folder, **options)
    ways = (
        (options, [tensors_file(hc.rank())] if options else all_files()),
        ({}, all_files()),
        ({"shard": 3}, None),
    )
    for again, files in ways:
        model, optimizer, found = resumed(folder, monkeypatch, **again)
        assert files is None or found == set(files)
        if "wire" not in options or again == options:
            assert_same(state_of(model, optimizer), written)
            train(model, optimizer)
            # Moments of shards are those of float32 master weights, which a whole optimizer has not.
            assert_same(state_of(model, optimizer), after, 0.0 if again == options else 0.01)


def test_shards_resume_from_those_of_any_number_of_ranks(folder, monkeypatch):
    written, after = saved(folder / "run", shard=3)
    others = {max(1, hc.size() - 1), hc.size() + 1, 8} - {hc.size()}
    if hc.rank() == 0:
        for ranks in others:
            divide(folder / "run" / STEP, folder / f"of {ranks}", ranks)
    hc.barrier()
    for ranks in sorted(others):
        model, optimizer, _ = resumed(folder / f"of {ranks}", monkeypatch, shard=3)
        assert_same(state_of(model, optimizer), written)
        assert model.head.weight is model.tokens.weight
        train(model, optimizer)
        assert_same(state_of(model, optimizer), after, 1e-5)


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def replace(path):
    """By that of another run."""
    shutil.copytree(path.parents[3] / "other" / STEP, path.parent, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flip, "its content is not what was written"),
        (replace, "its content is not what was written"),
        (Path.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "it has 0 bytes"),
    ],
    ids=["flipped", "replaced", "gone", "empty"],
)
def test_a_shard_that_is_damaged_after_it_was_found_is_an_error_on_all_ranks(
    folder, monkeypatch, change, says
):
    for seed, name in enumerate(("run", "other")):
        saved(folder / name, seed, shard=3)
    file = folder / "run" / STEP / tensors_file(hc.size() - 1)

    def fits_and_damaged(*arguments):
        check_fits(*arguments)
        hc.barrier()  # all have read what they compare
        if hc.rank() == 0:
            change(file)
        hc.barrier()

    monkeypatch.setattr(training_state, "check_fits", fits_and_damaged)
    model, optimizer = made(2, shard=3)
    before = state_of(model, optimizer)
    with pytest.raises(SnapshotError, match=rf"'{file.parent}' .*rank-0000.\.safetensors: {says}") as error:
        resume(folder / "run", model, optimizer)
    assert "\n" not in str(error.value)
    assert_same(state_of(model, optimizer), before)
