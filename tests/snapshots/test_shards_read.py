"""Tests of which files a rank reads when it resumes with its weights in shards: those with elements of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from same import whole_weights
from snapshot_files import opened_files
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.snapshots import reader, snapshots as snapshots_module
from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.content import ShardState
from hvd_ckpt.snapshots.files import open_snapshot
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.loading import load_weights
from hvd_ckpt.snapshots.schema import RankShards, ShardMetadata, shard_file, weights_file
from hvd_ckpt.snapshots.writer import SnapshotWriter

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
        self.frozen.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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
        self.optimizer: Any = hc.DistributedOptimizer(
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
        """The files of a snapshot with elements of this rank's weights."""
        manifest = open_snapshot(path).manifest
        assert manifest.sharding is not None and manifest.sharding.weights is not None
        own = {
            manifest.aliases.get(name, name): (start, stop)
            for name, start, stop, _ in self.optimizer.weight_pieces()
        }
        return {
            weights_file(rank)
            for rank, shards in enumerate(manifest.sharding.weights)
            for name, offset, size in shards
            if name in own and max(offset, own[name][0]) < min(offset + size, own[name][1])
        }


def check_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of weight files that are read inside, without those that rank 0 verifies for all."""
    names: set[str] = set()
    with opened_files(monkeypatch) as counts:
        yield names
    verified = 1 if hc.rank() == 0 else 0
    names.update(name for name, count in counts.items() if "weights-" in name and count > verified)


def divide(path: Path, folder: Path, ranks: int) -> None:
    """Writes a snapshot of this one's state as so many ranks would, with equal parts of all parameters. For one rank to call."""
    files, whole = open_snapshot(path), reader.read(path, 0)
    assert files.manifest.sharding is not None
    options = files.state(shard_file(0))["param_groups"]
    parameters = files.manifest.sharding.parameters
    states: dict[str, dict[str, Any]] = {}
    for rank, shards in enumerate(files.manifest.sharding.optimizer):
        for number, shard in enumerate(shards):
            entries = states.setdefault(shard.name, {})
            for key, value in files.state(shard_file(rank))["state"].get(number, {}).items():
                entries.setdefault(key, []).append((shard.offset, value))
    total = sum(parameter.numel for parameter in parameters.values())
    writers = [
        SnapshotWriter(folder / "snapshots", 9, Participant(rank, ranks, "0" * 8), print)
        for rank in range(ranks)
    ]
    for rank, writer in enumerate(writers):
        first, last, reached = rank * total // ranks, (rank + 1) * total // ranks, 0
        pieces = []
        for name, parameter in parameters.items():
            start, stop = max(first - reached, 0), min(last - reached, parameter.numel)
            pieces += [(name, start, stop)] if start < stop else []
            reached += parameter.numel
        weights = {
            name: parameters[name].spec.flatten(whole.weights[name])[start:stop]
            for name, start, stop in pieces
        }
        state = {}
        of_optimizer = [piece for piece in pieces if piece[0] in states]
        for number, (name, start, stop) in enumerate(of_optimizer):
            state[number] = {
                key: parts[0][1]
                if parts[0][1].dim() == 0
                else torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])])[start:stop]
                for key, parts in states[name].items()
            }
        state = {number: entries for number, entries in state.items() if entries}
        groups = [{**options[0], "params": list(range(len(of_optimizer)))}]
        shards = RankShards(
            stage=3,
            parameters=parameters,
            optimizer=ShardMetadata.of(of_optimizer),
            weights=ShardMetadata.of(pieces),
        )
        writer.begin(
            1,
            weights=whole.first_weights,
            replicated=whole.replicated,
            per_rank=whole.per_rank,
            shard=ShardState(
                shards, files.manifest.aliases, {"state": state, "param_groups": groups}, weights
            ),
        )
    for writer in writers:
        writer.close()
    assert open_snapshot(folder / "snapshots" / STEP).manifest.ranks == ranks


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
        with opened(monkeypatch) as read:
            again.resume(folder / name)
        assert read == again.needed(path), name
        if name == "run":
            assert read == {weights_file(hc.rank())}
        elif name == "of 8":
            assert 0 < len(read) < 8
        check_same(again.state(), expected)
        assert again.model.head.weight is again.model.tokens.weight
        again.model(torch.arange(24)).backward()
        again.optimizer.step()  # with the state of the optimizer

    # The model and its optimizer are whole: all files.
    again = Run(1)
    with opened(monkeypatch) as read:
        again.resume(folder / "run")
    assert read == {weights_file(rank) for rank in range(hc.size())}
    check_same(again.state(), expected)


@pytest.mark.parametrize("options", [{}, {"shard": 1}, {"shard": 2, "wire": "bf16"}], ids=str)
def test_weights_in_shards_resume_from_whole_ones_and_from_exact_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    run = Run(0, trained=True, **options)
    run.save(folder / "run")
    again = Run(1, **options)
    with opened(monkeypatch) as read:
        again.resume(folder / "run")
    assert read == ({weights_file(hc.rank())} if "wire" in options else set())
    check_same(again.state(), run.state())
    sharded = Run(1, shard=3)
    with opened(monkeypatch) as read:
        sharded.resume(folder / "run")
    if "wire" in options:
        assert read == sharded.needed(folder / "run" / "snapshots" / STEP)
    else:
        assert not read
        check_same(sharded.state(), run.state())


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flip, r"weights-0000.\.safetensors: its content is not what was written"),
        (Path.unlink, r"weights-0000.\.safetensors: No such file"),
        (lambda path: path.write_bytes(b""), r"weights-0000.\.safetensors: it has 0 bytes"),
        (lambda path: shutil.copytree(path.parents[3] / "other" / "snapshots" / STEP, path.parent,
                                      dirs_exist_ok=True), "has been written again while it was read"),
    ],
    ids=["flipped", "gone", "empty", "replaced"],
)  # fmt: skip
def test_a_shard_that_is_damaged_after_it_was_found_is_an_error_on_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], says: str
) -> None:
    for seed, name in enumerate(("run", "other")):
        Run(seed, trained=True, shard=3).save(folder / name)
    file = folder / "run" / "snapshots" / STEP / weights_file(hc.size() - 1)

    def damage_and_load(*arguments: Any) -> None:
        if hc.rank() == 0:
            change(file)
        hc.barrier()
        load_weights(*arguments)

    monkeypatch.setattr(snapshots_module, "load_weights", damage_and_load)
    run = Run(2, shard=3)
    before = run.state()
    with pytest.raises(SnapshotError, match=f"'{file.parent}' .*{says}") as error:
        run.resume(folder / "run")
    assert "\n" not in str(error.value)
    check_same(run.state(), before)
