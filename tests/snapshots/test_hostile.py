"""What somebody made who means harm, or who took the wrong file: one line that names it, and nothing is changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from snapshot_files import write
from torch import nn

from hvd_ckpt.data.volumes import open_volumes
from hvd_ckpt.launchers import check_environment
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.random_state import random_state
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.optim import build_optimizer
from hvd_ckpt.training.resume import check_fits, check_state


def make(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return model, build_optimizer("adamw", model, 1e-3)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    model, optimizer = make()
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    common = {
        "config": Config("gpt-tiny", steps=4).as_dict(),
        "steps": 4,
        "ranks": 1,
        "ema": None,
        "progress": {"step": 2, "position": 8, "best": None, "waited": 0},
        "optimizer": optimizer.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "plan": None,
        "samples": 40,
        "threads": 2,
    }
    reduction = {
        "version": 2,
        "order": names,
        "sparse": {},
        "densified": {},
        "bucket_cap_bytes": 1e6,
        "counts": None,
        "lower_counts": {},
    }
    own = {
        "random": random_state(),
        "reduction": reduction,
        "buffers": dict(model.named_buffers()),
        "logged": (0.5, 3.0),
    }
    folder = tmp_path_factory.mktemp("snapshots")
    return reader.read(write(folder, 2, common, own, model.state_dict()), 0)


def test_state_of_a_run_is_valid(resumed: Snapshot) -> None:
    check_state(resumed)
    check_fits(resumed, *make())


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("replicated", "progress", "step"), -1, "replicated: progress.step is -1"),
        (("replicated", "progress", "best"), "1", 'progress.best is "1"'),
        (("replicated", "progress", "more"), 1, "progress.more"),
        (("replicated", "config", "batch"), 0, "replicated.config: batch is 0"),
        (("replicated", "optimizer", "state", 9), {}, r"optimizer: state\[9\] is not of a parameter"),
        (("replicated", "optimizer", "state", 0, "exp_avg"), "x", r'optimizer: state\[0\].exp_avg is "x"'),
        (("replicated", "optimizer", "param_groups", 0, "params"), "x", r"param_groups\[0\].params is \"x\""),
        (("replicated", "scaler", "scale"), -1.0, "scaler.scale is -1.0"),
        (("replicated", "plan"), "\ud800", "replicated: plan: it has characters"),
        (("replicated", "samples"), torch.ones(2), "samples is a Tensor"),
        (("per_rank", "reduction", "order"), ["a", "a"], "reduction: order has a name twice"),
        (("per_rank", "buffers", "1.running_mean"), 3, r"buffers\[\"1.running_mean\"\] is 3"),
        (("per_rank", "logged"), (1.0, float("inf")), r"logged\[1\] is inf"),
    ],
)
def test_invalid_state_is_refused_with_its_key(
    resumed: Snapshot, place: tuple[Any, ...], value: object, says: str
) -> None:
    parts = {"replicated": copy.deepcopy(resumed.replicated), "per_rank": copy.deepcopy(resumed.per_rank)}
    inner: Any = parts
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    forged = Snapshot(
        resumed.step, 1, resumed.weights, parts["replicated"], parts["per_rank"], resumed.manifest
    )
    with pytest.raises(ConfigError, match=f"the snapshot of step 2 cannot be used: .*{says}"):
        check_state(forged)


def test_a_missing_key_is_named(resumed: Snapshot) -> None:
    for part in ("replicated", "per_rank"):
        for key in getattr(resumed, part):
            parts = {"replicated": resumed.replicated, "per_rank": resumed.per_rank}
            parts[part] = {name: value for name, value in parts[part].items() if name != key}
            forged = Snapshot(
                resumed.step, 1, resumed.weights, parts["replicated"], parts["per_rank"], resumed.manifest
            )
            with pytest.raises(ConfigError, match=f"{part}: {key} is missing"):
                check_state(forged)


def test_state_of_another_model_or_other_options_is_refused(resumed: Snapshot) -> None:
    with pytest.raises(ConfigError, match=r"weights\[.*must be a tensor of float32 .*of another model"):
        check_fits(resumed, *make(5))
    model, _ = make()
    with pytest.raises(
        ConfigError, match="has no max_exp_avg_sq, which this optimizer with its options needs"
    ):
        check_fits(resumed, model, build_optimizer("adamw", model, 1e-3, 0.0, {"amsgrad": True}))
    forged = copy.deepcopy(resumed)
    forged.replicated["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"state\[0\].exp_avg is a tensor of float32 \[3\], and must be"):
        check_fits(forged, *make())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OMP_NUM_THREADS", "rubbish"),
        ("HOROVOD_CYCLE_TIME", "nan"),
        ("HOROVOD_RANK", "x"),
        ("HOROVOD_SIZE", "9" * 5000),
    ],
)
def test_a_variable_that_is_not_a_number_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} is '{value[:5]}"):
        check_environment()


def test_arrays_that_unfold_or_hold_objects_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    for arrays, says in (
        ({"volumes": numpy.array([print], object), "labels": numpy.zeros(1, int)}, "Python objects"),
        (
            {"volumes": numpy.zeros((2, 3, 3, 3)), "labels": numpy.full((2, 3, 3, 3), 2**40)},
            "1099511627776",
        ),
        ({"volumes": numpy.array(3), "labels": numpy.zeros(1, int)}, r"volumes of type int64 and shape \(\)"),
    ):
        numpy.savez(file, **arrays, allow_pickle=True)
        with pytest.raises(ValueError, match=says):
            open_volumes(file, 4)
