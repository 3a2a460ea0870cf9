"""A commit of an elastic run stays as it was taken. After a change of ranks: test_elastic.py, tests/faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.torch.elastic import TorchState
from same import same
from snapshot_files import state_of

from hvd_ckpt.app.training.elastic import committed

pytestmark = pytest.mark.ranks(gloo=(2,))


def state(seed: int) -> dict[str, Any]:
    weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    images = weight.to(memory_format=torch.channels_last)
    weights = {
        "weight": images,
        "half": weight.bfloat16(),
        "count": torch.tensor(seed),
        "none": torch.empty(0, 7),
    }
    replicated = {"options": ({"means": (weight + 1,), "seen": weight > 0},), "lr": (seed, 0.5)}
    return {"weights": weights, "replicated": replicated}


def trainer(rank: int, values: dict[str, Any]) -> Any:
    saved = state_of(**values, per_rank={"optimizer": None})
    progress = SimpleNamespace(step=rank)
    return SimpleNamespace(folder=Path(f"/run-{rank}"), progress=progress, state=lambda: saved)


def test_a_commit_stays_as_it_was_taken() -> None:
    values = state(1)
    run = TorchState(point=committed(trainer(7, values)))
    values["weights"]["weight"].zero_()
    values["replicated"]["options"][0]["means"][0].zero_()
    values["replicated"].clear()
    for _ in range(2):
        run.restore()
        made = dataclasses.replace(run.point.snapshot)  # as a trainer reads it
        assert same({"weights": made.weights, "replicated": made.replicated}, state(1))
        made.replicated["options"][0]["means"][0].zero_()  # as an optimizer does
