"""Tests of snapshots of sharded state: joined, split for other ranks, and refused if they do not fit."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from same import assert_same
from snapshot_files import divided, read_snapshot, sign, state_of, write_ranks
from torch import nn

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.snapshots.schema import Layout, Range, TensorMetadata
from hvd_ckpt.utils.cuts import Cut

RANKS = 3
GUIDE = Path(__file__).parents[2] / "docs" / "snapshots.md"


class Model(nn.Module):
    """Two names for one weight, one that lies channels last, one that is empty, a buffer, and half precision."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.images = nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.bf16 = nn.Parameter(torch.randn(11).bfloat16())
        self.norm = nn.BatchNorm1d(2)


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """Snapshots of steps 1 and 2, of which the second has averages, written by three ranks' writers."""
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        state = state_of(model.state_dict(), {"a": 1, "ema": {"n_averaged": 1} if step == 2 else None})
        for name, parameter in model.named_parameters():
            moment = torch.randn_like(parameter, requires_grad=False)
            state.ranges += [Range.of(f"optimizer.exp_avg/{name}", moment)]
            if step == 2:
                state.ranges += [Range.of(f"average/{name}", parameter.detach().float() + 1)]
        states = [
            dataclasses.replace(
                state, per_rank=rank, ranges=divided(state.ranges, rank, RANKS), layout=Layout(stage=3)
            )
            for rank in range(RANKS)
        ]
        write_ranks(folder / "snapshots", step, states)
    return folder


@pytest.fixture
def path(written, tmp_path):
    """The newer snapshot of a copy."""
    return Path(shutil.copytree(written, tmp_path / "run")) / "snapshots" / "step-00000002"


def loaded_by_guide(path, output):
    """The weights that the script of the guide loads, without this library."""
    blocks = GUIDE.read_text("utf-8").split("```")
    script = next(block for block in blocks if "safe_open" in block).removeprefix("python\n")
    assert "hvd_ckpt" not in script
    subprocess.run([sys.executable, "-c", script, path, output], check=True)
    return torch.load(output, weights_only=True)


def test_shards_of_all_ranks_make_whole_weights(path, model, tmp_path):
    found = read_snapshot(path, 1)
    assert (found.per_rank, found.replicated["a"], found.manifest.ranks) == (1, 1, RANKS)
    assert found.manifest.layout.stage == 3
    expected, whole, average = dict(model.state_dict()), tmp_path / "whole.st", tmp_path / "average.st"
    assert export(open_snapshot(path), whole) == (len(expected), os.path.getsize(whole))
    for weights in found.weights, load_file(whole), loaded_by_guide(path, tmp_path / "weights.pt"):
        assert_same(weights, expected)
    assert found.weights["images.weight"].stride() == model.images.weight.stride()
    export(open_snapshot(path), average, ema=True)
    buffers = dict(model.named_buffers())
    averages = {name: (one.float() + 1).to(one.dtype) for name, one in expected.items()}
    assert_same(load_file(average), averages | buffers)


def test_parts_of_cut_weights_make_whole_ones(tmp_path):
    """Three blocks of rows, and columns, over two parts; one dimension is not divided evenly."""
    weights = {"rows.weight": torch.randn(9, 4), "columns.weight": torch.randn(3, 7, 2)}
    how = {"rows.weight": Cut(0, 9, 3), "columns.weight": Cut(1, 7)}
    states = []
    for rank in range(4):
        replica, part = divmod(rank, 2)
        ranges = []
        for name, weight in weights.items():
            own = how[name].of(weight, 2, part)
            whole = TensorMetadata.of(weight.dtype, TensorSpec.of(own), how[name], 2)
            of_part = Range(f"weights/{name}", *whole.place_of(part), whole, own.reshape(-1))
            ranges += divided([of_part], replica, 2)
        states.append(SavedState(None, None, ranges, {}, Layout(tensor=2)))
    path = write_ranks(tmp_path, 1, states)
    for found in loaded_by_guide(path, tmp_path / "weights.pt"), read_snapshot(path).weights:
        assert_same(found, weights)


def test_a_damaged_shard_is_found_and_the_snapshot_before_exported(path, tmp_path):
    file = path / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    says = r"rank-00002\.safetensors: its content is not what was"
    with pytest.raises(SnapshotError, match=says):
        export(open_snapshot(path), tmp_path / "new.safetensors")
    assert os.listdir(tmp_path) == ["run"]
    arguments = ["export", str(tmp_path / "run"), "--output", str(tmp_path / "new" / "w")]
    with pytest.warns(UserWarning, match=says):
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "Weights of step 1, written by 3 ranks, 11 tensors" in result.output


def test_export_errors_are_one_line(path, tmp_path):
    there, new = tmp_path / "there", tmp_path / "new"
    there.touch()
    for says, *arguments in (
        ("there' is there: give another name", path, "--output", there),
        ("there is no snapshot in", tmp_path / "none"),
        ("nnn' cannot be used: File name too long", "n" * 300),
        ("--convert: cannot use 'xxx", tmp_path, "--convert", "x" * 300),
        ("no averages", path.with_name("step-00000001"), "--ema", "--output", new),
        ("--output: cannot write '/proc/none/file'", path, "--output", "/proc/none/file"),
    ):
        result = CliRunner().invoke(main, ["export", *map(str, arguments)])
        assert result.exit_code == 2 and says in result.output and result.output.count("\n") == 1


ONCE = 'each element of "weights/bf16" once'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(version=4), "version is 4"),
        (lambda m: m.update(format="a plan"), '"format": "hvd_ckpt snapshot"'),
        (lambda m: m.update(more=1), "more is not a known key"),
        (lambda m: m.update(step=2.0), "step is 2.0"),
        (lambda m: m.update(time=None), "time is null"),
        (lambda m: m.update(ranks=10**9), "ranks is 1000000000"),
        (lambda m: m.update(ranks=4), "not those of a snapshot of 4 ranks"),
        (lambda m: m["files"].update({"../more.pt": m["files"].pop("replicated.pt")}), r'"\.\./more.pt"'),
        (lambda m: m["aliases"].update(c="d"), '"c" of "d"'),
        (lambda m: m["aliases"].update(bf16="empty"), '"bf16" of "empty"'),
        (lambda m: m["layout"].update(stage=4), "layout.stage is 4"),
        (lambda m: m["layout"].update(tensor=2), "3 ranks are not those of 1 pipeline stages and 2 parts"),
        (lambda m: m["tensors"]["weights/bf16"].update(dtype="qint9"), '"qint9" is not a dtype'),
        (lambda m: m["tensors"]["weights/bf16"].update(size=[12]), ONCE),
        (lambda m: m["ranges"][1].pop("weights/bf16"), ONCE),
        (lambda m: m["ranges"][1].update({"weights/bf16": [2, 7]}), ONCE),
        (lambda m: m["ranges"].pop(), "ranges are those of 2 ranks"),
        (lambda m: m["ranges"].append({}), "ranges are those of 4 ranks"),
        (lambda m: m["ranges"][0].update({"weights/bf16": [0, -1]}), r"ranges\[0\].*is -1"),
        (lambda m: m["ranges"][0].update({"weights/more": [0, 1]}), 'ranges has "weights/more"'),
        (lambda m: m["tensors"]["weights/images.weight"].update(stride=[0, 0, 1, 2]), "do not fit"),
        (lambda m: m["tensors"].update(more={"size": [1], "dtype": "float32"}), 'each element of "more" once'),
        (lambda m: m["tensors"].pop("weights/bf16"), 'ranges has "weights/bf16"'),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(path, change, says):
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    sign(path, **manifest)
    with pytest.raises(SnapshotError, match=f"manifest.json: .*{says}"):
        read_snapshot(path)
