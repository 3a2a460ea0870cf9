"""Tests of the user's own streams: the samples of each rank, and resumed runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from same import assert_same_state

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.own import Stream
from hvd_ckpt.app.training.trainer import Trainer

pytestmark = pytest.mark.ranks(gloo=(1, 2, 3))

MODULE = """
import torch
from torch import nn
from torch.nn import functional

SEEN = []

def model(): return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))

class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, count): self.count, self.epoch = count, 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self):  # each pass begins at another place
        numbers = [(self.epoch + one) % self.count for one in range(self.count)]
        return ((torch.tensor([float(one)]), torch.tensor([float(one)])) for one in numbers)

def loss(output, targets):
    if torch.is_grad_enabled():
        SEEN.extend(targets.view(-1).tolist())
    return functional.mse_loss(output, targets)

def data(): return Numbers(7), Numbers(5)
def alone(): return Numbers(7)
def empty(): return Numbers(0), [(torch.zeros(1), torch.zeros(1))]
def once(): return iter(Numbers(7))
"""
ORDER = [float((number // 7 + number % 7) % 7) for number in range(8 * 2 * 3)]  # of the samples of all ranks


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Any]:
    (tmp_path / "own_streams.py").write_text(MODULE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hvd_ckpt.app.training.report.loss_plot", lambda *_: None)
    yield __import__("own_streams")
    sys.modules.pop("own_streams", None)


def make(folder: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"steps": 8, "batch": 2, "loss": "own_streams:loss", "eval_batches": 2}
    settings |= {
        "data": "own_streams:data",
        "snapshot_every": 1,
        "keep_snapshots": 8,
        "eval_every": 5,
        **changes,
    }
    if "resume" not in changes:
        settings["output"] = str(folder)
    config = Config("own_streams:model", **settings)
    parts = hc.training.assemble(config)
    return Trainer(config, parts.model, parts.objective, parts.train, parts.test)


def test_ranks_share_a_stream_and_resume_it(folder: Path, module: Any) -> None:
    whole = make(folder / "whole")
    whole.run()
    ranks, batches = hc.size(), range(0, 8 * 2 * hc.size(), 2 * hc.size())
    own = [ORDER[one] for first in batches for one in range(first + hc.rank(), first + 2 * ranks, ranks)]
    assert own == module.SEEN
    assert whole.evaluate()["samples"] == min(5, 2 * 2 * ranks)
    for step in (3, 4, 7):
        copy = folder / f"copy{step}"
        if hc.rank() == 0:
            name = f"step-{step:08d}"
            shutil.copytree(folder / "whole" / "snapshots" / name, copy / "snapshots" / name)
            shutil.copy(folder / "whole" / "config.yaml", copy)
        hc.barrier()
        module.SEEN.clear()
        resumed = make(copy, resume=str(copy))
        resumed.run()
        assert own[2 * step :] == module.SEEN
        assert_same_state(resumed.model.state_dict(), whole.model.state_dict(), "weights")
        assert resumed.progress == whole.progress


@pytest.mark.ranks(gloo=(1,))
def test_resumed_streams_read_each_pass_again(module: Any) -> None:
    stream = Stream(module.Numbers(7))
    for indices in ([0, 2], [1, 3], [30, 33], [31, 32], [10, 11], [2, 1]):
        assert stream.batch(indices, [0, 0]).targets.view(-1).tolist() == [ORDER[one] for one in indices]
    stream.batch([20], [0])
    assert stream.pass_of(6) == (0, 0) and stream.pass_of(14) == stream.pass_of(20) == (2, 14)
    again = Stream(module.Numbers(7))
    again.seek(2, 14)
    assert again.batch([40], [0]).targets.item() == ORDER[40]
    with pytest.raises(ValueError, match="pass 0 over the stream has no samples"):
        Stream(module.Numbers(0)).batch([0], [0])


@pytest.mark.ranks(gloo=(1,))
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 2, "steps": None}, "epochs 2: own_streams:data returned a stream, which has no length, give steps"),
        ({"eval_batches": None}, "returned a stream to evaluate on, give eval_batches"),
        ({"data": "own_streams:alone"}, "returned one stream, which cannot be split"),
        ({"data": "own_streams:empty"}, "ValueError: pass 0 over the stream has no samples"),
        ({"data": "own_streams:once"}, "returned a generator, which can be read once"),
    ],
)  # fmt: skip
def test_errors_are_one_line(settings: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        make(folder / "run", **settings)
    trainer = make(folder / "run", data="own_streams:alone", validation_split=0.0, dry_run=False)
    assert trainer.run().evaluation == {}
