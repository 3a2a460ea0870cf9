"""Tests of optimizer state and parameters of shards in files: equal bits, and a full disk on one rank is an error on all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, train, wrap
from same import assert_same, whole_weights
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.offload.host_memory import MappedFiles, OffloadError

pytestmark = pytest.mark.ranks(gloo=(2, 3))


class Own(torch.optim.Adam):
    """An optimizer from elsewhere."""


def wrapped(model: nn.Module, folder: Path | None, offload: str = "optimizer", **options: Any) -> Any:
    """With state, or parameters too, in a folder, if there is one."""
    if folder is not None:
        options |= {"offload": offload, "offload_folder": folder}
    optimizer = Own(model.parameters(), lr=0.01)
    return wrap(model, optimizer, bucket_cap_mb=0.004, elementwise=True, **options)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 57), nn.Tanh(), nn.Linear(57, 9))


@pytest.mark.parametrize("dtype, wire", [(torch.float32, "fp32"), (torch.bfloat16, "int8")])
def test_offloaded_parameters_train_to_the_same_bits(dtype: torch.dtype, wire: str, tmp_path: Path) -> None:
    """Made on disk, recomputed, accumulated over two backward passes, clipped, evaluated and written to in between."""
    found: list[Any] = []
    for folder in (tmp_path, None):
        with hc.init_on_disk(folder):
            layers = small()
        model = hc.CheckpointSequential([*layers[:2], nn.Linear(57, 57), layers[2]], segments=3).to(dtype)
        optimizer = wrapped(model, folder, "parameters", shard="parameters", wire=wire)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            loss(model, 10 + step).backward()
            hc.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if step == 1:
                with optimizer.gathered_parameters():
                    model[0].weight.data.mul_(0.5)
            with torch.no_grad():
                loss(model, step)
        found.append((whole_weights(model, optimizer), optimizer.full_state_dict(all_ranks=True)["state"]))
    assert_same(*found)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_one_rank_cannot_use_is_an_error_on_all(tmp_path: Path) -> None:
    last = hc.rank() == hc.size() - 1
    with pytest.raises(OffloadError, match="No such file" if last else "another rank"):
        wrapped(small(), tmp_path / "missing" if last else tmp_path, shard=1)
    with pytest.raises(TypeError, match="rank 1: |str"):
        wrapped(small(), 5 if hc.rank() == 1 else tmp_path, shard=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", ["shards", "state"])
def test_no_room_when_wrapping_leaves_the_model_whole(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    before = [one.detach().clone() for one in model.parameters()]
    allocate, calls = MappedFiles.allocate, []

    def allocate_some(memory: MappedFiles, wanted: Any) -> Any:
        calls.append(wanted)
        if hc.rank() == hc.size() - 1 and (len(calls) > 3 if fails == "shards" else len(wanted) > 1):
            return allocate(MappedFiles(tmp_path / "missing"), wanted)
        return allocate(memory, wanted)

    monkeypatch.setattr(MappedFiles, "allocate", allocate_some)
    with pytest.raises(OffloadError):
        wrapped(model, tmp_path, "parameters", shard=3)
    monkeypatch.undo()
    assert_same([one.detach() for one in model.parameters()], before)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    optimizer = wrapped(model, tmp_path, "parameters", shard=3)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("shard", [1, 2])
def test_no_room_on_one_rank_in_a_step_changes_nothing(shard: int, tmp_path: Path) -> None:
    """A group that is added needs room as well. The step that found none is taken again."""

    def grow(folder: Path | None) -> tuple[nn.Sequential, Any]:
        model = small()
        optimizer = wrapped(model, folder, shard=shard)
        train(model, optimizer, range(1))
        if folder is not None and hc.rank() == hc.size() - 1:
            shutil.rmtree(folder)
        model.append(nn.Linear(9, 40))
        optimizer.add_param_group({"params": list(model[3].parameters())})
        optimizer.zero_grad()
        loss(model, 1).backward()
        return model, optimizer

    (model, optimizer), (plain, its) = grow(tmp_path), grow(None)
    its.step()
    before = whole_weights(model, optimizer)
    with pytest.raises(OffloadError):
        optimizer.step()
    assert_same(whole_weights(model, optimizer), before)
    tmp_path.mkdir(exist_ok=True)
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    assert_same(whole_weights(model, optimizer), whole_weights(plain, its))
