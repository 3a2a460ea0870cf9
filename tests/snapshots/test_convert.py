"""Snapshots of earlier versions: refused with the way out, and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from same import assert_same
from snapshot_files import read_snapshot, sign, state_of_run, write
from torch import nn

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.snapshots.fits import PerRankState, ReplicatedState, optimizer_values, validated
from hvd_ckpt.snapshots.folder import SnapshotError


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def replicated(model: nn.Module, **more: Any) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    of_loop = {"scheduler": None, "loader": {"position": 5}, "loop": {}}
    of_job = {"scaler": None, "threads": 1, "device": "cpu", "replicas": None, "mid_period": False}
    return {"groups": [names], "ema": None, **of_loop, **of_job, **more}


def write_old(folder: Path, files: dict[str, Any], sharding: Any, ranks: int) -> Path:
    path = folder / "old" / "snapshots" / "step-00000007"
    path.mkdir(parents=True)
    for name, content in files.items():
        if name.endswith(".pt"):
            torch.save(content, path / name)
        else:
            save_file({key: value.contiguous() for key, value in content.items()}, path / name)
    document = {
        "format": "hvd_ckpt snapshot",
        "version": 1,
        "step": 7,
        "ranks": ranks,
        "time": "",
        "libraries": {},
    }
    document |= {"aliases": {"tied": "0.bias"}, "sharding": sharding, "files": {name: {} for name in files}}
    (path / "manifest.json").write_text(json.dumps(document))
    sign(path)
    with pytest.raises(SnapshotError, match="earlier version wrote it.*hvd-ckpt export --convert OLD NEW"):
        read_snapshot(path)
    return path


def check(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    result = CliRunner().invoke(main, ["export", "--convert", str(folder / "old"), str(folder / "new")])
    assert result.exit_code == 0, result.output
    found = read_snapshot(folder / "new" / "snapshots" / "step-00000007", rank)
    for name, weight in model.state_dict().items():
        assert torch.equal(found.weights[name], weight), name
    assert found.weights["tied"] is found.weights["0.bias"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = optimizer_values(found, names.values())["state"]
    for parameter, name in names.items():
        assert values[name]["step"] == 1 and list(values[name]) == list(optimizer.state[parameter])
        for key in ("exp_avg", "exp_avg_sq"):
            whole = found.whole_tensors(f"optimizer.{key}")[name]
            assert torch.equal(whole, optimizer.state[parameter][key]), name
    buffers = found.whole_tensors(f"buffers@{rank}")
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert found.replicated["options"][0]["betas"] == (0.9, 0.999) and found.per_rank["optimizer"] is not None
    validated(ReplicatedState, found.replicated, "replicated")
    assert validated(PerRankState, found.per_rank, "per_rank").loader == {"position": 5}


def test_a_whole_snapshot(tmp_path: Path) -> None:
    model, optimizer = trained()
    own = {
        "random": {},
        "reduction": {},
        "loader": None,
        "buffers": dict(model.named_buffers()),
        "local": None,
    }
    files = {
        "model.safetensors": model.state_dict(),
        "replicated.pt": replicated(model, optimizer=optimizer.state_dict()),
        "rank-00000.pt": own,
    }
    write_old(tmp_path, files, None, 1)
    check(tmp_path, model, optimizer, 0)
    result = CliRunner().invoke(main, ["export", "--convert", str(tmp_path / "new"), str(tmp_path / "newer")])
    assert result.exit_code == 2 and "it is not of an earlier version" in result.output
    result = CliRunner().invoke(main, ["export", "--convert", "n" * 300, str(tmp_path / "newer")])
    assert result.exit_code == 2 and "nnn/manifest.json': File name too long" in result.output
    write_old(tmp_path / "local", {**files, "rank-00000.pt": {**own, "local": {}}}, None, 1)
    old = tmp_path / "local" / "old"
    result = CliRunner().invoke(main, ["export", "--convert", str(old), str(tmp_path / "newer")])
    assert result.exit_code == 2 and "it is of local SGD" in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"files": 3}, "AttributeError"),
        ({"files": {"replicated.pt": 3}}, "TypeError"),
        ({"step": "x"}, "ValueError"),
        ({"ranks": "x"}, "TypeError"),
        ({"sharding": {"parameters": {}, "tensor": 2}}, "it is of tensor parallelism"),
    ],
)
def test_what_version_1_does_not_write_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    model, optimizer = trained()
    files = {"model.safetensors": model.state_dict()}
    files["replicated.pt"] = replicated(model, optimizer=optimizer.state_dict())
    sign(write_old(tmp_path, files, None, 1), **changes)
    result = CliRunner().invoke(main, ["export", "--convert", str(tmp_path / "old"), str(tmp_path / "new")])
    assert result.exit_code == 2 and says in result.output and result.output.count("\n") == 1


def test_shards_of_two_ranks(tmp_path: Path) -> None:
    model, optimizer = trained()
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    files: dict[str, Any] = {"model.safetensors": buffers, "replicated.pt": replicated(model, optimizer=None)}
    sharding: dict[str, Any] = {"stage": 3, "pipeline_stages": 1, "tensor": 1, "optimizer": [], "weights": []}
    sharding["parameters"] = {
        name: {"size": list(one.shape), "stride": list(one.stride()), "dtype": "float32", "cut": None}
        for name, one in named.items()
    }
    for rank in range(2):
        shards, state, weights = [], {}, {}
        for number, (name, parameter) in enumerate(named.items()):
            half = parameter.numel() // 2
            part = slice(0, half) if rank == 0 else slice(half, parameter.numel())
            flat = parameter.detach().flatten()[part]
            shards.append([name, part.start, len(flat)])
            weights[name] = flat
            state[number] = {
                key: value.flatten()[part] if value.dim() else value
                for key, value in optimizer.state[parameter].items()
            }
        groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(range(len(named)))}]
        files[f"shard-{rank:05d}.pt"] = {"state": state, "param_groups": groups}
        files[f"weights-{rank:05d}.safetensors"] = weights
        own = {"random": {}, "reduction": {}, "buffers": buffers, "local": None}
        files[f"rank-{rank:05d}.pt"] = own
        sharding["optimizer"].append(shards)
        sharding["weights"].append(shards)
    path = write_old(tmp_path, files, sharding, 2)
    check(tmp_path, model, optimizer, 1)
    shard = path / "shard-00001.pt"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    result = CliRunner().invoke(main, ["export", "--convert", str(tmp_path / "old"), str(tmp_path / "again")])
    assert result.exit_code == 2 and "shard-00001.pt" in result.output and result.output.count("\n") == 1


def as_in_version_2(path: Path, position: Any, **logged: Any) -> Path:
    """Makes a snapshot of one rank that which version 2 would have written; returns its run."""
    for name in ("replicated.pt", "rank-00000.pt"):
        values = torch.load(path / name)
        if name == "replicated.pt":
            del values["scheduler"], values["loop"], values["logged"]
            values |= {"ema": {"n_averaged": 4}, "loader": position, **logged}
        else:
            values |= {"loader": None} if logged else {"loader": None, "logged": [(3.5, 2.0)]}
        torch.save(values, path / name)
    sign(path, version=2)
    with pytest.raises(SnapshotError, match="earlier version wrote it.*hvd-ckpt export --convert OLD NEW"):
        read_snapshot(path)
    return path.parents[1]


@pytest.mark.parametrize("logged", [{}, {"logged": [(3.5, 2.0)]}], ids=["of each rank", "of all"])
def test_a_snapshot_of_version_2_has_the_same_tensors(tmp_path: Path, logged: dict[str, Any]) -> None:
    replicated, per_rank, weights, ranges = state_of_run()
    path = write(tmp_path / "old" / "snapshots", 7, replicated, per_rank, weights, ranges)
    before = read_snapshot(path, 0)
    names = before.manifest.tensors
    wanted = [before.manifest.all_of(name) for name in names]
    tensors = [tensor.clone() for tensor in before.read(wanted)]
    run = as_in_version_2(path, {"position": 5}, **logged)
    result = CliRunner().invoke(main, ["export", "--convert", str(run), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    found = read_snapshot(tmp_path / "new" / "snapshots" / path.name, 0)
    assert found.manifest.tensors == names and found.manifest.aliases == before.manifest.aliases
    assert_same([*found.read(wanted)], tensors)
    assert_same(found.replicated, {**before.replicated, "ema": 4})
    assert found.per_rank["loader"] == {"position": 5} and found.per_rank.keys() == before.per_rank.keys()
