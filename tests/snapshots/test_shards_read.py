"""Tests of which files a rank reads when it resumes with its weights in shards: those with elements of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from same import assert_same, whole_weights
from sharded import distribute
from snapshot_files import divided, read_snapshot, write_ranks
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.snapshots import training_state
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import check_fits, optimizer_values
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.reader import Snapshot, open_snapshot
from hvd_ckpt.snapshots.schema import Range, tensors_file

pytestmark = pytest.mark.ranks(gloo=(2, 3, 4))

STEP = "step-00000001"


class Model(nn.Module):
    """Two names for one weight, a frozen layer whose weight lies channels last, half precision, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(24, 16)
        self.images = nn.Conv2d(1, 16, 3, padding=1)
        self.frozen = nn.Conv2d(16, 8, 3).requires_grad_(False)
        self.frozen.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(16)
        self.bfloats = nn.Parameter(torch.randn(37).bfloat16())
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.norm(self.tokens(numbers))
        images = self.frozen(self.images(hidden.view(-1, 1, 4, 4)))
        return self.head(hidden).square().mean() + images.mean() + self.bfloats.float().sum()


class Run:
    """A model and its optimizer, after a step if ``trained``."""

    def __init__(self, seed: int, trained: bool = False, **options: Any) -> None:
        self.model = Model(seed)
        self.optimizer: Any = distribute(
            torch.optim.AdamW(self.model.parameters(), lr=0.1),
            self.model.named_parameters(),
            model=self.model,
            **options,
        )
        if trained:
            # The same on all ranks, whose buffers are then equal: other ranks resume with those of the first.
            self.model(torch.arange(12)).backward()
            self.optimizer.step()

    def snapshots(self, folder: Path) -> hc.Snapshots:
        return hc.Snapshots(folder, model=self.model, optimizer=self.optimizer)

    def save(self, folder: Path) -> None:
        with self.snapshots(folder) as snapshots:
            snapshots.save(1)

    def resume(self, folder: Path) -> None:
        with self.snapshots(folder) as snapshots:
            assert snapshots.resume() == 1

    def state(self) -> dict[str, Tensor]:
        """Weights and buffers, whole."""
        return {
            **whole_weights(self.model, self.optimizer),
            **{name: value.clone() for name, value in self.model.named_buffers()},
        }

    def needed(self, path: Path) -> set[str]:
        """The files of a snapshot with elements of this rank's weights and buffers."""
        files = open_snapshot(path)
        names = ModelTensors(self.model, self.optimizer)
        shards = [part for part in names.weights() if part.spec is None]
        own = {f"weights/{part.name}": (part.start, part.stop) for part in shards}
        if files.manifest.replicas != hc.size():  # else those of this rank, in its own file
            own.update({f"weights/{name}": (0, one.numel()) for name, one in self.model.named_buffers()})
        return {
            tensors_file(rank)
            for name, (start, stop) in own.items()
            for first, last, rank in files.manifest.by_tensor.get(name, ())
            if max(first, start) < min(last, stop)
        }


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of tensor files that are read inside."""
    names: set[str] = set()
    unspied = Snapshot.open_file

    def spying(files: Snapshot, rank: int) -> Any:
        names.add(tensors_file(rank))
        return unspied(files, rank)

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "open_file", spying)
        yield names


def divide(path: Path, folder: Path, ranks: int) -> None:
    """Writes a snapshot of this one's state as so many ranks would, with equal parts of all tensors. For one rank to call."""
    files, found = open_snapshot(path), read_snapshot(path, 0)
    whole = []
    for name, tensor in files.manifest.tensors.items():
        (values,) = files.read([Range(name, 0, tensor.numel, tensor)])
        whole.append(Range(name, 0, tensor.numel, tensor, values))
    values = optimizer_values(found, files.manifest.names("weights").keys() - dict(Model(0).named_buffers()))
    per_rank, manifest = {**found.per_rank, "optimizer": values}, found.manifest
    states = [
        SavedState(found.replicated, per_rank, divided(whole, rank, ranks), manifest.aliases, manifest.layout)
        for rank in range(ranks)
    ]
    assert open_snapshot(write_ranks(folder / "snapshots", 1, states)).manifest.ranks == ranks


def test_a_rank_reads_the_weight_files_that_have_elements_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(0, trained=True, shard=3)
    run.save(folder / "run")
    expected = run.state()
    if hc.rank() == 0:
        for ranks in {max(1, hc.size() - 1), hc.size() + 1, 8} - {hc.size()}:
            divide(folder / "run" / "snapshots" / STEP, folder / f"of {ranks}", ranks)
    hc.barrier()
    for name in ("run", *sorted(path.name for path in folder.glob("of *"))):
        path = folder / name / "snapshots" / STEP
        again = Run(1, shard=3)
        with opened(monkeypatch) as found:
            again.resume(folder / name)
        if name == "run":
            assert found == {tensors_file(hc.rank())}
        else:
            assert found >= again.needed(path), name
        assert_same(again.state(), expected)
        assert again.model.head.weight is again.model.tokens.weight
        again.model(torch.arange(24)).backward()
        again.optimizer.step()  # with the state of the optimizer

    # The model and its optimizer are whole: all files.
    again = Run(1)
    with opened(monkeypatch) as found:
        again.resume(folder / "run")
    assert found == {tensors_file(rank) for rank in range(hc.size())}
    assert_same(again.state(), expected)


@pytest.mark.parametrize("options", [{}, {"shard": 1}, {"shard": 2, "wire": "bf16"}], ids=str)
def test_weights_in_shards_resume_from_whole_ones_and_from_exact_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    run = Run(0, trained=True, **options)
    run.save(folder / "run")
    again = Run(1, **options)
    with opened(monkeypatch) as found:
        again.resume(folder / "run")
    expected = {hc.rank()} if options else range(hc.size())
    assert found == {tensors_file(rank) for rank in expected}
    assert_same(again.state(), run.state())
    sharded = Run(1, shard=3)
    with opened(monkeypatch) as found:
        sharded.resume(folder / "run")
    assert found >= sharded.needed(folder / "run" / "snapshots" / STEP)
    if "wire" not in options:
        assert_same(sharded.state(), run.state())


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flip, r"rank-0000.\.safetensors: its content is not what was written"),
        (Path.unlink, r"rank-0000.\.safetensors: No such file"),
        (lambda path: path.write_bytes(b""), r"rank-0000.\.safetensors: it has 0 bytes"),
        (lambda path: shutil.copytree(path.parents[3] / "other" / "snapshots" / STEP, path.parent,
                                      dirs_exist_ok=True), r"rank-0000.\.safetensors: its content is not what was written"),
    ],
    ids=["flipped", "gone", "empty", "replaced"],
)  # fmt: skip
def test_a_shard_that_is_damaged_after_it_was_found_is_an_error_on_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], says: str
) -> None:
    for seed, name in enumerate(("run", "other")):
        Run(seed, trained=True, shard=3).save(folder / name)
    file = folder / "run" / "snapshots" / STEP / tensors_file(hc.size() - 1)

    def fits_and_damaged(*arguments: Any) -> None:
        check_fits(*arguments)
        hc.barrier()  # all have read what they compare
        if hc.rank() == 0:
            change(file)
        hc.barrier()

    monkeypatch.setattr(training_state, "check_fits", fits_and_damaged)
    run = Run(2, shard=3)
    before = run.state()
    with pytest.raises(SnapshotError, match=f"'{file.parent}' .*{says}") as error:
        run.resume(folder / "run")
    assert "\n" not in str(error.value)
    assert_same(run.state(), before)
