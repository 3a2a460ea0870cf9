"""Tests of snapshots of sharded state: joined, split for other ranks, and refused if they do not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from snapshot_files import sign
from torch import nn

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.app.training.optim import build_optimizer
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.content import ShardState, tensors_of
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.resume import read_shards, state_of_shards
from hvd_ckpt.snapshots.schema import RankShards, ShardMetadata
from hvd_ckpt.snapshots.writer import SnapshotWriter

RANKS = 3


class Model(nn.Module):
    """Two names for one weight, one that lies channels last, one that is empty, a buffer, and half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.images = nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.bf16 = nn.Parameter(torch.randn(11).bfloat16())
        self.norm = nn.BatchNorm1d(2)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cuts(numel: int, ranks: int = RANKS) -> list[tuple[int, int]]:
    """Unequal parts, of which the first may be empty."""
    edges = [0, numel // 5, numel // 2, numel][: ranks + 1]
    return list(zip(edges, [*edges[1:], numel]))


def part_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """As a sharded optimizer of that rank would have it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    pieces: list[Any] = []
    groups: list[Any] = []
    state: dict[int, Any] = {}
    for group in optimizer.param_groups:
        numbers = []
        for parameter in group["params"]:
            start, stop = cuts(parameter.numel())[rank]
            if start == stop:
                continue
            numbers.append(len(pieces))
            state[len(pieces)] = {
                name: flat(value)[start:stop] if value.dim() else value
                for name, value in optimizer.state[parameter].items()
            }
            pieces.append([names[parameter], start, stop])
        groups.append({**{key: one for key, one in group.items() if key != "params"}, "params": numbers})
    return {
        "state": state,
        "param_groups": groups,
        "pieces": pieces,
        "ranks": RANKS,
        "rank": rank,
        "stage": 3,
    }


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """Snapshots of steps 1 and 2, written by three ranks' writers."""
    model = Model()
    optimizer = build_optimizer("adamw", model, 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    parameters, aliases = tensors_of(model, buffers=False)
    buffers = dict(model.named_buffers())
    told: list[str] = []
    writers = [
        SnapshotWriter(tmp_path / "snapshots", 9, Participant(rank, RANKS, "0" * 8), told.append)
        for rank in range(RANKS)
    ]
    for step in (1, 2):
        for rank, writer in enumerate(writers):
            weights = {
                name: flat(parameter)[slice(*span)]
                for name, parameter in model.named_parameters()
                if (span := cuts(parameter.numel())[rank])[0] < span[1]
            }
            part = part_of(model, optimizer, rank)
            named = dict(model.named_parameters())
            state = {"state": part["state"], "param_groups": part["param_groups"]}
            if step == 2:
                state["averages"] = {
                    number: flat(named[name])[start:stop].float() + 1
                    for number, (name, start, stop) in enumerate(part["pieces"])
                }
            shards = RankShards(
                stage=3,
                parameters=parameters,
                optimizer=ShardMetadata.of(part["pieces"]),
                weights=ShardMetadata.of((name, *cuts(named[name].numel())[rank]) for name in weights),
            )
            shard = ShardState(shards, aliases, state, weights)
            replicated = {"a": 1, "ema": {"n_averaged": 1, "averages": None} if step == 2 else None}
            writer.begin(
                step, weights=buffers, replicated=replicated, per_rank=rank, changing=buffers, shard=shard
            )
        for writer in writers:
            writer.wait()
    for writer in writers:
        writer.close()
    assert not told
    return tmp_path / "snapshots" / "step-00000002", model, optimizer


def test_shards_of_all_ranks_make_whole_weights(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path, model, _ = made
    found = reader.read(path, 1)
    assert (found.per_rank, found.replicated["a"], found.ranks) == (1, 1, RANKS)
    assert found.sharding is not None and found.sharding.stage == 3
    expected = model.state_dict()
    written = export(path, tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert (written.step, written.ranks, written.tensors) == (2, RANKS, len(expected))
    assert written.bytes == os.path.getsize(tmp_path / "whole.safetensors")
    for weights in (found.weights, whole):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name
    assert found.weights["images.weight"].stride() == model.state_dict()["images.weight"].stride()
    export(path, tmp_path / "average.safetensors", ema=True)
    average = load_file(tmp_path / "average.safetensors")
    assert average.keys() == expected.keys()
    buffers = dict(model.named_buffers())
    for name, weight in expected.items():
        wanted = weight if name in buffers else (weight.float() + 1).to(weight.dtype)
        assert average[name].dtype == weight.dtype and torch.equal(average[name], wanted), name


def test_a_damaged_shard_is_found_and_the_snapshot_before_used(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path, model, optimizer = made
    found = reader.read(path)
    file = path / "shard-00001.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    everything = [
        ShardRange(name, 0, one.numel(), TensorSpec.of(one), True) for name, one in model.named_parameters()
    ]
    with pytest.raises(SnapshotError, match=r"shard-00001\.pt: its content is not what was"):
        read_shards(found, everything, state_of_shards(optimizer, model), len(optimizer.param_groups))
    file.write_bytes(content)
    file = path / "weights-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    for use in (reader.read, lambda path: export(path, tmp_path / "new.safetensors")):
        with pytest.raises(SnapshotError, match=r"weights-00002\.safetensors: its content is not what was"):
            use(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["snapshots"]
    result = CliRunner().invoke(main, ["export", str(tmp_path), "--output", str(tmp_path / "new" / "w")])
    assert result.exit_code == 0, result.output
    assert "weights-00002.safetensors: its content" in result.output
    assert "Weights of step 1, written by 3 ranks, 11 tensors" in result.output


def test_export_errors_are_one_line(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    for arguments, says in (
        ((str(made[0]), "--output", str(tmp_path / "there")), "there' is there: give another name"),
        ((str(tmp_path / "none"),), "there is no snapshot in"),
        (
            (str(made[0].with_name("step-00000001")), "--ema", "--output", str(tmp_path / "new")),
            "no averages",
        ),
        ((str(made[0]), "--output", "/proc/none/file"), "--output: cannot write '/proc/none/file'"),
    ):
        result = CliRunner().invoke(main, ["export", *arguments])
        assert result.exit_code == 2 and says in result.output and result.output.count("\n") == 1


def as_object(name: str, offset: int, size: int) -> dict[str, Any]:
    """A shard as in manifests of earlier versions."""
    return {"name": name, "offset": offset, "size": size}


def test_shards_as_objects_are_read_too(made: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    path = made[0]
    sharding = json.loads((path / "manifest.json").read_bytes())["sharding"]
    for part in ("weights", "optimizer"):
        sharding[part] = [[as_object(*shard) for shard in of_rank] for of_rank in sharding[part]]
    now = reader.read(path)
    sign(path, sharding=sharding)
    before = reader.read(path)
    assert before.sharding == now.sharding
    assert all(torch.equal(weight, before.weights[name]) for name, weight in now.weights.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shards: shards.update(stage=4), "sharding.stage is 4"),
        (lambda shards: shards["parameters"]["bf16"].update(dtype="qint9"), '"qint9" is not a dtype'),
        (lambda shards: shards["parameters"]["bf16"].update(size=[12]), 'each element of "bf16" once'),
        (lambda shards: shards["weights"][0].pop(), "do not have each element of"),
        (lambda shards: shards["optimizer"].pop(), "do not have each element of"),
        (lambda shards: shards["weights"][0].__setitem__(0, as_object(*shards["weights"][0][0][:2], -1)),
         "size is -1"),
        (lambda shards: shards["weights"][0][0].__setitem__(2, -1), r"weights\[0\]\[0\]\[2\] is -1"),
        (lambda shards: shards["weights"][0][0].pop(), r"weights\[0\]\[0\]\[2\] is missing"),
        (lambda shards: (shards["optimizer"].append([]), shards["weights"].append([])), "shards of 3 ranks"),
        (lambda shards: shards["parameters"]["images.weight"].update(stride=[0, 0, 1, 2]), "do not fit"),
        (lambda shards: shards["parameters"].update(more={"size": [1], "stride": [1], "dtype": "float32"}),
         'no shard of "more"'),
    ],
)  # fmt: skip
def test_a_manifest_whose_shards_do_not_fit_is_refused(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], change: Callable[[Any], None], says: str
) -> None:
    sharding = json.loads((made[0] / "manifest.json").read_bytes())["sharding"]
    change(sharding)
    sign(made[0], sharding=sharding)
    with pytest.raises(SnapshotError, match=f"manifest.json: .*{says}"):
        reader.read(made[0])
