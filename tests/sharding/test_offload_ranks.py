"""Tests of optimizer state and parameters of shards in files: equal bits, and a full disk on one rank is an error on all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, train, wrap
from same import whole_weights
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.offload.host_memory import MappedFiles, OffloadError

pytestmark = pytest.mark.ranks(gloo=(2, 3))


class Own(torch.optim.Adam):
    """An optimizer from elsewhere."""


def job(
    folder: Path | None, dtype: torch.dtype = torch.float32, model: Any = None, **options: Any
) -> tuple[nn.Sequential, Any]:
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 57), nn.Tanh(), nn.Linear(57, 9)).to(dtype)
    if folder is not None:
        options = {"offload": "optimizer", "offload_folder": folder, **options}
    optimizer = Own(model.parameters(), lr=0.01)
    return model, wrap(model, optimizer, bucket_cap_mb=0.004, elementwise=True, **options)


def weights(model: nn.Module, optimizer: Any) -> torch.Tensor:
    return torch.cat([values.flatten() for values in whole_weights(model, optimizer).values()])


@pytest.mark.parametrize("dtype, wire", [(torch.float32, "fp32"), (torch.bfloat16, "int8")])
def test_offloaded_parameters_train_to_the_same_bits(dtype: torch.dtype, wire: str, tmp_path: Path) -> None:
    """Recomputed, accumulated over two backward passes, clipped, evaluated and written to in between."""

    def run(folder: Path | None) -> tuple[torch.Tensor, dict[str, Any] | None]:
        options: dict[str, Any] = {"shard": "parameters", "wire": wire}
        if folder is not None:
            options["offload"] = "parameters"
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(5)]
        blocks[3] = blocks[1]  # shared
        with hc.init_on_disk(folder):
            model = nn.Sequential(
                nn.Linear(WIDTH, 40), hc.CheckpointSequential(blocks, segments=3), nn.Linear(40, 9)
            )
        model, optimizer = job(folder, dtype, model=model.to(dtype), **options)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            loss(model, 10 + step).backward()
            optimizer.synchronize()
            hc.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
            if step == 1:
                with optimizer.gathered_parameters():
                    model[0].weight.data.mul_(0.5)
            with torch.no_grad():
                model(torch.ones(2, WIDTH, dtype=dtype))
        return weights(model, optimizer), optimizer.full_state_dict(all_ranks=True)

    (plain, state), (offloaded, other) = run(None), run(tmp_path)
    assert torch.equal(plain, offloaded)
    assert state is not None and other is not None
    for key, values in state["state"].items():
        assert all(torch.equal(value, other["state"][key][name]) for name, value in values.items())
    assert list(tmp_path.iterdir()) == []


def test_no_room_on_one_rank_is_an_error_on_all_when_wrapping(tmp_path: Path) -> None:
    folder = tmp_path / "missing" if hc.rank() == hc.size() - 1 else tmp_path
    said = "No such file" if hc.rank() == hc.size() - 1 else "another rank"
    with pytest.raises(OffloadError, match=said):
        job(folder, shard=1)


def test_a_folder_that_is_no_path_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="rank 1: |str"):
        job(5 if hc.rank() == 1 else tmp_path, shard=1)  # type: ignore[arg-type]


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

    def wrapped() -> Any:
        return hc.DistributedOptimizer(
            torch.optim.Adam(model.parameters()),
            model=model,
            shard=hc.Shard(3, offload="parameters", offload_folder=tmp_path),
        )

    monkeypatch.setattr(MappedFiles, "allocate", allocate_some)
    with pytest.raises(OffloadError):
        wrapped()
    assert all(torch.equal(one, value) for one, value in zip(model.parameters(), before))
    monkeypatch.undo()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    optimizer = wrapped()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("shard", [1, 2])
def test_no_room_on_one_rank_in_a_step_changes_nothing(shard: int, tmp_path: Path) -> None:
    """A group that is added needs room as well. The step that found none is taken again."""

    def grow(folder: Path | None) -> tuple[nn.Sequential, Any]:
        model, optimizer = job(folder, shard=shard)
        train(model, optimizer, range(1))
        if folder is not None and hc.rank() == hc.size() - 1:
            shutil.rmtree(folder)
        model.append(nn.Linear(9, 40))
        optimizer.add_param_group({"params": list(model[3].parameters())})
        optimizer.zero_grad()
        loss(model, 1).backward()
        return model, optimizer

    model, optimizer = grow(None)
    optimizer.step()
    offloaded, own = grow(tmp_path)
    before = weights(offloaded, own)
    with pytest.raises(OffloadError):
        own.step()
    assert torch.equal(weights(offloaded, own), before)
    tmp_path.mkdir(exist_ok=True)
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        own.step()
    assert torch.equal(weights(offloaded, own), weights(model, optimizer))
