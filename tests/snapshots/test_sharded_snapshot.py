"""Tests of snapshots of sharded state: joined, split for other ranks, and refused if they do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from snapshot_files import divided, read_snapshot, sign, state_of, write_ranks
from torch import nn

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.snapshots.schema import Layout, Range, TensorMetadata
from hvd_ckpt.utils.cuts import Cut

RANKS = 3
ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """Two names for one weight, one that lies channels last, one that is empty, a buffer, and half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.images = nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)
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


def part_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, averaged: bool) -> list[Range]:
    """As a sharded optimizer of that rank would have it."""
    ranges = []

    def add(kind: str, name: str, values: torch.Tensor) -> None:
        start, stop = cuts(values.numel())[rank]
        whole = TensorMetadata.of(values.dtype, TensorSpec.of(values))
        if start < stop or (rank == 0 and not values.numel()):
            ranges.append(Range(f"{kind}/{name}", start, stop, whole, flat(values)[start:stop]))

    for name, parameter in model.named_parameters():
        add("weights", name, parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][key]
            add(f"optimizer.{key}", name, torch.empty_like(parameter, dtype=value.dtype).copy_(value))
        if averaged:
            add("average", name, parameter.detach().float() + 1)
    return ranges


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """Snapshots of steps 1 and 2, written by three ranks' writers."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for step in (1, 2):
        replicated = {"a": 1, "ema": {"n_averaged": 1} if step == 2 else None}
        states = []
        for rank in range(RANKS):
            buffers = state_of(dict(model.named_buffers()) if rank == 0 else {}).ranges
            ranges = [*buffers, *part_of(model, optimizer, rank, step == 2)]
            states.append(SavedState(replicated, rank, ranges, ModelTensors(model).aliases, Layout(stage=3)))
        path = write_ranks(tmp_path / "snapshots", step, states)
    return path, model, optimizer


def test_shards_of_all_ranks_make_whole_weights(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path, model, _ = made
    found = read_snapshot(path, 1)
    assert (found.per_rank, found.replicated["a"], found.manifest.ranks) == (1, 1, RANKS)
    assert found.manifest.layout.stage == 3
    expected = model.state_dict()
    tensors, size = export(open_snapshot(path), tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert tensors == len(expected)
    assert size == os.path.getsize(tmp_path / "whole.safetensors")
    for weights in (found.weights, whole):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name
    assert found.weights["images.weight"].stride() == model.state_dict()["images.weight"].stride()
    export(open_snapshot(path), tmp_path / "average.safetensors", ema=True)
    average = load_file(tmp_path / "average.safetensors")
    assert average.keys() == expected.keys()
    buffers = dict(model.named_buffers())
    for name, weight in expected.items():
        wanted = weight if name in buffers else (weight.float() + 1).to(weight.dtype)
        assert average[name].dtype == weight.dtype and torch.equal(average[name], wanted), name


def script() -> str:
    """That of the guide, which loads the weights without this library."""
    blocks = (ROOT / "docs" / "snapshots.md").read_text("utf-8").split("```")
    return next(block for block in blocks if "safe_open" in block).removeprefix("python\n")


def loaded_by_script(path: Path, output: Path) -> dict[str, torch.Tensor]:
    assert "hvd_ckpt" not in script()
    subprocess.run([sys.executable, "-c", script(), path, output], check=True)
    return torch.load(output, weights_only=True)


def test_the_script_of_the_guide_loads_the_weights(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path, model, _ = made
    found, expected = loaded_by_script(path, tmp_path / "weights.pt"), model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


def test_the_script_of_the_guide_loads_parts(tmp_path: Path) -> None:
    """Three blocks of rows, and columns, over two parts; one dimension is not divided evenly."""
    weights = {"rows.weight": torch.randn(9, 4), "columns.weight": torch.randn(3, 7, 2)}
    how = {"rows.weight": Cut(0, 9, 3), "columns.weight": Cut(1, 7)}
    states = []
    for rank in range(4):
        replica, part = divmod(rank, 2)
        ranges = list[Range]()
        for name, weight in weights.items():
            own = how[name].of(weight, 2, part)
            whole = TensorMetadata.of(weight.dtype, TensorSpec.of(own), how[name], 2)
            of_part = Range(f"weights/{name}", *whole.place_of(part), whole, own.reshape(-1))
            ranges += divided([of_part], replica, 2)
        states.append(SavedState(None, None, ranges, {}, Layout(tensor=2)))
    path = write_ranks(tmp_path, 1, states)
    for found in loaded_by_script(path, tmp_path / "weights.pt"), read_snapshot(path).weights:
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_a_damaged_shard_is_found_and_the_snapshot_before_used(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path = made[0]
    file = path / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    for use in (read_snapshot, lambda path: export(open_snapshot(path), tmp_path / "new.safetensors")):
        with pytest.raises(SnapshotError, match=r"rank-00002\.safetensors: its content is not what was"):
            use(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["snapshots"]
    arguments = ["export", str(tmp_path), "--output", str(tmp_path / "new" / "w")]
    with pytest.warns(UserWarning, match=r"rank-00002\.safetensors: its content"):
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "Weights of step 1, written by 3 ranks, 11 tensors" in result.output


def test_export_errors_are_one_line(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    for arguments, says in (
        ((str(made[0]), "--output", str(tmp_path / "there")), "there' is there: give another name"),
        ((str(tmp_path / "none"),), "there is no snapshot in"),
        (("n" * 300,), "nnn' cannot be used: File name too long"),
        ((str(tmp_path), "--convert", "x" * 300), "--convert: cannot use 'xxx"),
        (
            (str(made[0].with_name("step-00000001")), "--ema", "--output", str(tmp_path / "new")),
            "no averages",
        ),
        ((str(made[0]), "--output", "/proc/none/file"), "--output: cannot write '/proc/none/file'"),
    ):
        result = CliRunner().invoke(main, ["export", *arguments])
        assert result.exit_code == 2 and says in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["layout"].update(stage=4), "layout.stage is 4"),
        (lambda m: m["layout"].update(tensor=2), "3 ranks are not those of 1 pipeline stages and 2 parts"),
        (lambda m: m["tensors"]["weights/bf16"].update(dtype="qint9"), '"qint9" is not a dtype'),
        (lambda m: m["tensors"]["weights/bf16"].update(size=[12]), 'each element of "weights/bf16" once'),
        (lambda m: m["ranges"][1].pop("weights/bf16"), 'each element of "weights/bf16" once'),
        (lambda m: m["ranges"][1].update({"weights/bf16": [2, 6]}), 'each element of "weights/bf16" once'),
        (lambda m: m["ranges"].pop(), "ranges are those of 2 ranks"),
        (lambda m: m["ranges"].append({}), "ranges are those of 4 ranks"),
        (lambda m: m["ranges"][0].update({"weights/bf16": [0, -1]}), r"ranges\[0\].*is -1"),
        (lambda m: m["ranges"][0].update({"weights/more": [0, 1]}), 'ranges has "weights/more"'),
        (lambda m: m["tensors"]["weights/images.weight"].update(stride=[0, 0, 1, 2]), "do not fit"),
        (lambda m: m["tensors"].update(more={"size": [1], "dtype": "float32"}), 'each element of "more" once'),
        (lambda m: m["tensors"].pop("weights/bf16"), 'ranges has "weights/bf16"'),
    ],
)  # fmt: skip
def test_a_manifest_whose_ranges_do_not_fit_is_refused(
    made: tuple[Path, nn.Module, torch.optim.Optimizer], change: Callable[[Any], None], says: str
) -> None:
    manifest = json.loads((made[0] / "manifest.json").read_bytes())
    change(manifest)
    sign(made[0], **manifest)
    with pytest.raises(SnapshotError, match=f"manifest.json: .*{says}"):
        read_snapshot(made[0])
