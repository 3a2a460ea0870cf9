"""Snapshots of earlier versions: refused with the way out, and converted."""

import json

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

NAME = "step-00000007"
OWN = {"random": {}, "reduction": {}, "local": None}


@pytest.fixture
def trained():
    """A model and its optimizer, after a step."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def convert(old, new):
    """The status of the command, and what it prints, which is one line if it fails."""
    result = CliRunner().invoke(main, ["export", "--convert", str(old), str(new)])
    assert result.exit_code == 0 or result.output.count("\n") == 1, result.output
    return result.exit_code, result.output


def assert_old(path):
    with pytest.raises(SnapshotError, match="earlier version wrote it.*hvd-ckpt export --convert OLD NEW"):
        read_snapshot(path)


def write_old(run, contents, sharding=None, ranks=1, **changes):
    """A snapshot of version 1."""
    path = run / "snapshots" / NAME
    path.mkdir(parents=True)
    for name, content in contents.items():
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
    document |= {
        "aliases": {"tied": "0.bias"},
        "sharding": sharding,
        "files": {name: {} for name in contents},
    }
    (path / "manifest.json").write_text(json.dumps(document))
    sign(path)
    assert_old(path)
    sign(path, **changes)


def whole_files(model, optimizer, local=None):
    """Those of version 1 of one rank."""
    own = {**OWN, "loader": None, "buffers": dict(model.named_buffers()), "local": local}
    replicated = replicated_of(model, optimizer.state_dict())
    return {"model.safetensors": model.state_dict(), "replicated.pt": replicated, "rank-00000.pt": own}


def replicated_of(model, optimizer):
    of_loop = {"scheduler": None, "loader": {"position": 5}, "loop": {}, "optimizer": optimizer, "ema": None}
    of_job = {"scaler": None, "threads": 1, "device": "cpu", "replicas": None, "mid_period": False}
    return {"groups": [[name for name, _ in model.named_parameters()]], **of_loop, **of_job}


def assert_converted(folder, model, optimizer, rank):
    status, output = convert(folder / "old", folder / "new")
    assert status == 0, output
    found = read_snapshot(folder / "new" / "snapshots" / NAME, rank)
    assert_same(found.weights, {**model.state_dict(), "tied": model[0].bias.detach()})
    assert found.weights["tied"] is found.weights["0.bias"]
    names = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    values = optimizer_values(found, names)["state"]
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {name: state[key] for name, state in names.items()}
        assert_same(found.whole_tensors(f"optimizer.{key}"), moments)
    assert all(values[name]["step"] == 1 and list(values[name]) == list(names[name]) for name in names)
    assert found.whole_tensors(f"buffers@{rank}").keys() == dict(model.named_buffers()).keys()
    assert found.replicated["options"][0]["betas"] == (0.9, 0.999) and found.per_rank["optimizer"] is not None
    validated(ReplicatedState, found.replicated, "replicated")
    assert validated(PerRankState, found.per_rank, "per_rank").loader == {"position": 5}


def test_a_whole_snapshot(tmp_path, trained):
    write_old(tmp_path / "old", whole_files(*trained))
    assert_converted(tmp_path, *trained, 0)
    status, output = convert(tmp_path / "new", tmp_path / "newer")
    assert status == 2 and "it is not of an earlier version" in output
    status, output = convert("n" * 300, tmp_path / "newer")
    assert status == 2 and "nnn/manifest.json': File name too long" in output


@pytest.mark.parametrize(
    ("local", "changes", "says"),
    [
        ({}, {}, "it is of local SGD"),
        (None, {"sharding": {"parameters": {}, "tensor": 2}}, "it is of tensor parallelism"),
        # Nor what version 1 does not write.
        (None, {"files": 3}, "AttributeError"),
        (None, {"files": {"replicated.pt": 3}}, "TypeError"),
        (None, {"step": "x"}, "ValueError"),
        (None, {"ranks": "x"}, "TypeError"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path, trained, local, changes, says):
    write_old(tmp_path / "old", whole_files(*trained, local), **changes)
    status, output = convert(tmp_path / "old", tmp_path / "new")
    assert status == 2 and says in output


def test_shards_of_two_ranks(tmp_path, trained):
    model, optimizer = trained
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    files = {"model.safetensors": buffers, "replicated.pt": replicated_of(model, None)}
    sharding = {"stage": 3, "pipeline_stages": 1, "tensor": 1, "optimizer": [], "weights": []}
    sharding["parameters"] = {
        name: {"size": list(one.shape), "stride": list(one.stride()), "dtype": "float32", "cut": None}
        for name, one in named.items()
    }
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(range(len(named)))}]
    for rank in range(2):
        shards, state, weights = [], {}, {}
        for number, (name, parameter) in enumerate(named.items()):
            half = parameter.numel() // 2
            part = slice(0, half) if rank == 0 else slice(half, parameter.numel())
            weights[name] = parameter.detach().flatten()[part]
            shards.append([name, part.start, len(weights[name])])
            state[number] = {
                key: value.flatten()[part] if value.dim() else value
                for key, value in optimizer.state[parameter].items()
            }
        files[f"shard-{rank:05d}.pt"] = {"state": state, "param_groups": groups}
        files[f"weights-{rank:05d}.safetensors"] = weights
        files[f"rank-{rank:05d}.pt"] = {**OWN, "buffers": buffers}
        sharding["optimizer"].append(shards)
        sharding["weights"].append(shards)
    write_old(tmp_path / "old", files, sharding, 2)
    assert_converted(tmp_path, model, optimizer, 1)
    shard = tmp_path / "old" / "snapshots" / NAME / "shard-00001.pt"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    status, output = convert(tmp_path / "old", tmp_path / "again")
    assert status == 2 and "shard-00001.pt" in output


@pytest.mark.parametrize("logged", [{}, {"logged": [(3.5, 2.0)]}], ids=["of each rank", "of all"])
def test_a_snapshot_of_version_2_has_the_same_tensors(tmp_path, logged):
    path = write(tmp_path / "old" / "snapshots", 7, *state_of_run())
    before = read_snapshot(path, 0)
    names = before.manifest.tensors
    wanted = [before.manifest.all_of(name) for name in names]
    tensors = [tensor.clone() for tensor in before.read(wanted)]
    replicated = {**before.replicated, "ema": {"n_averaged": 4}, "loader": {"position": 5}}
    for name in ("scheduler", "loop", "logged"):
        del replicated[name]
    torch.save({**replicated, **logged}, path / "replicated.pt")
    torch.save({**before.per_rank, **({} if logged else {"logged": [(3.5, 2.0)]})}, path / "rank-00000.pt")
    sign(path, version=2)
    assert_old(path)
    assert convert(tmp_path / "old", tmp_path / "new")[0] == 0
    found = read_snapshot(tmp_path / "new" / "snapshots" / NAME, 0)
    assert found.manifest.tensors == names and found.manifest.aliases == before.manifest.aliases
    assert_same([*found.read(wanted)], tensors)
    assert_same(found.replicated, {**before.replicated, "ema": 4})
    assert found.per_rank["loader"] == {"position": 5} and found.per_rank.keys() == before.per_rank.keys()
