"""``hvd-ckpt train --local`` and ``--replicas``: resumed runs, evaluation, skipped steps, and what does not fit."""

from __future__ import annotations

import functools
import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from all_ranks import Poisoned
from safetensors.torch import load_file
from same import assert_same
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.app.training.ending import NonFiniteLoss
from hvd_ckpt.app.training.logs import read
from hvd_ckpt.app.training.modes import Plain
from hvd_ckpt.app.training.trainer import Outcome, Trainer
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.snapshots.schema import Manifest, libraries

pytestmark = [pytest.mark.ranks(gloo=(2,)), pytest.mark.usefixtures("one_thread")]

STREAMING = {"local": "4,outer_lr=0.7,outer_momentum=0.9,fragments=2,delay=3,wire=int8"}
GROUPED = {"local": STREAMING["local"] + ",within=[[0,1]]"}
STEPS = 10
R = 4


def train(
    folder: Path, objective: Callable[[Any], Any] = lambda objective: objective, **changes: Any
) -> tuple[Trainer, Outcome]:
    """The trainer of a run of a small model that has ended."""
    settings: dict[str, Any] = {"model": "resnet-20", "steps": STEPS, "batch": 2, "pixels": 8, "lr": 1e-2}
    settings |= {"log_every": 1, "eval_batches": 1, **changes}
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4 * 6 * 6, 10))
    trainer = runs.trainer_of(folder, settings, model, objective)
    return trainer, runs.run(trainer)


def train_records(folder: Path) -> list[dict[str, Any]]:
    return [one for one in read(folder / "log.jsonl") if one["kind"] == "train"]


# ------------------------------------------------------------------------------------ local SGD


def copy(run: Path, to: Path, step: int) -> str:
    """A run that was killed after the snapshot of a step."""
    if hc.rank() == 0:
        name = f"step-{step:08d}"
        shutil.copytree(run / "snapshots" / name, to / "snapshots" / name)
        shutil.copy(run / "config.yaml", to)
    hc.barrier()
    return str(to)


def assert_same_end(trainer: Trainer, other: Trainer) -> None:
    """Weights, buffers, the state of optimizer, averages and loss scale, and random state of this rank."""
    one, that = trainer.state(), other.state()
    ranges = [{each.name: each.values for each in state.ranges} for state in (one, that)]
    buffers = [dict(each.model.named_buffers()) for each in (trainer, other)]
    for ours, theirs in (ranges, buffers, (one.per_rank, that.per_rank)):
        assert_same(ours, theirs)
    for name in ("options", "scaler", "progress", "mid_period", "logged"):
        assert_same(one.replicated[name], that.replicated[name], place=name)


@pytest.mark.parametrize(
    "settings",
    [
        {**STREAMING, "clip": 0.5, "schedule": "cosine"},
        {"local": "5,outer_lr=0.5,within=[[0,1]]", "batch_norm": "deferred", "accumulate": 2},
        {"local": "5,delay=2", "precision": "fp16"},
        {**GROUPED, "shard": "gradients", "clip": 0.5},
        {**GROUPED, "shard": "parameters,offload=parameters", "precision": "fp16"},
    ],
    ids=["streaming", "one group", "fp16", "a sharded group", "an offloaded group"],
)
def test_a_run_that_is_killed_anywhere_ends_in_the_bits_of_one_that_is_not(settings, folder) -> None:
    whole, outcome = train(folder / "whole", **settings, snapshot_every=1, keep_snapshots=STEPS)
    assert_same_end(train(folder / "twice", **settings)[0], whole)
    # One average has just left by then, and the parts of the other are being gathered.
    again, resumed = train(folder, **settings, resume=copy(folder / "whole", folder / "resumed", 6))
    assert resumed.folder == folder / "resumed" and resumed.evaluation == outcome.evaluation
    assert_same_end(again, whole)


def test_ranks_differ_between_averages_of_which_logs_tell_and_an_evaluation_uses_their_mean(folder) -> None:
    trainer, outcome = train(folder / "run", **STREAMING)
    own = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    everyone = hc.allgather_object(own)
    assert not torch.equal(everyone[0]["0.weight"], everyone[1]["0.weight"])
    means = {
        name: (one + everyone[1][name]) / 2 if one.is_floating_point() else own[name]
        for name, one in everyone[0].items()
    }
    if hc.rank() == 0:
        name = f"step-{STEPS:08d}"
        export(open_snapshot(outcome.folder / "snapshots" / name), folder / "mean.safetensors")
        for each, value in load_file(folder / "mean.safetensors").items():
            torch.testing.assert_close(value, means[each])
    trainer.model.load_state_dict(means)
    trainer.config = trainer.config.model_copy(update={"local": None})
    assert trainer.evaluate() == pytest.approx(outcome.evaluation, rel=1e-5)

    trainer, outcome = train(folder / "logged", local=4, steps=9)
    if hc.rank() == 0:
        found = [one["divergence"] for one in train_records(outcome.folder)]
        assert found[:3] == [0.0] * 3 and len(set(found[3:7])) == 1 and found[7] == found[8] > 0
        assert 0 < found[3] != found[8] == trainer.optimizer.divergence


def test_another_number_of_ranks_and_other_periods_begin_at_the_end_of_one(folder, monkeypatch) -> None:
    settings = {"local": "2,outer_lr=0.7", "steps": 4, "snapshot_every": 1, "keep_snapshots": 4}
    train(folder / "run", **settings)
    within = copy(folder / "run", folder / "within", 3)
    at_the_end = copy(folder / "run", folder / "two", 2)
    other = {**settings, "local": "3,outer_lr=0.7,wire=int8"}
    again, _ = train(folder, **other, resume=copy(folder / "run", folder / "other", 2))
    assert again.optimizer.averaging.step == 2

    def refused(said: str, changed: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=said):
            train(folder, **{**settings, **changed}, resume=within)

    refused("step 3 lies within a period .* one with every=2, and this rank has every=3", {"local": 3})
    refused("the optimizer is not one of LocalSGD", {"local": None})
    refused("wire=int8", {"local": "2,outer_lr=0.7,wire=int8"})
    monkeypatch.setattr(Manifest, "replicas", 3)
    refused("there are 2 ranks, and it has the weights of", {})
    again, _ = train(folder, **settings, resume=at_the_end)
    assert again.optimizer.averaging.step == 2 and again.progress.step == 4


def test_a_loss_that_is_nan_skips_a_step_of_its_rank_or_ends_all(folder: Path, capsys: Any) -> None:
    def poisoned(objective: Any) -> Any:
        return Poisoned(objective, 3)

    trainer, _ = train(folder / "run", poisoned, local=4, log_every=5, on_nan="skip")
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert trainer.optimizer.skipped_steps == hc.rank()
    assert trainer.optimizer.averaging._worked == STEPS - hc.rank()
    said = "step 3: the loss is nan on rank 1"
    assert said in capsys.readouterr().err.replace("\n", " ") or hc.rank() == 1
    with pytest.raises(NonFiniteLoss, match=said):
        train(folder / "stop", poisoned, local=4, log_every=5)
    hc.barrier()


def test_unsupported_settings_are_one_line_on_all_ranks(folder, monkeypatch) -> None:
    for settings, said in (
        ({"local": "4,within=[[0,1,2]]"}, r"local 4,within=\[\[0,1,2\]\]: within=\[\[0, 1, 2\]\]"),
        ({"local": "400,fragments=300"}, "fragments=300"),
        ({"local": "4,within=[[0,1]]", "shard": "optimizer,wire=fp16"}, "leave wire out"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(folder / said[:12], **settings)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigError, match="delay 2: it commits where"):
        train(folder / "elastic", local="4,delay=2")


# ------------------------------------------------------------------------------------ logical replicas


class Odd:
    """An objective whose loss is nan for batches of a certain sum, whoever computes them, and that keeps all losses."""

    def __init__(self, objective: Any, nan_in: int = 0) -> None:
        self._objective, self._nan_in = objective, nan_in
        self.terms: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def loss(self, output, batch):
        loss = self._objective.loss(output, batch)
        if torch.is_grad_enabled():
            if self._nan_in and int(batch.targets.sum()) % self._nan_in == 0:
                loss = loss * float("nan")
            self.terms.append((loss.item(), self._objective.weight(batch)))
        return loss


@pytest.mark.ranks(gloo=(1, 2))
def test_a_logged_loss_is_the_mean_over_all_terms_of_all_replicas(folder, monkeypatch) -> None:
    """And so is the mean of the losses that the backward passes of replicas begin with."""
    begun: list[float] = []
    backward = Plain._backward

    def noted(self: Plain, loss: torch.Tensor, last: bool) -> None:
        begun.append(loss.item())
        backward(self, loss, last)

    monkeypatch.setattr(Plain, "_backward", noted)
    trainer, _ = train(folder / "run", Odd, replicas=R, steps=1)
    objective: Any = trainer.objective
    losses, weights = zip(*itertools.chain(*hc.allgather_object(objective.terms)))
    assert len(losses) == R
    expected = sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)
    assert train_records(folder / "run")[0]["loss"] == pytest.approx(expected, rel=1e-9)
    everyone = list(itertools.chain(*hc.allgather_object(begun)))
    assert sum(everyone) / R == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(gloo=(1, 2))
def test_a_step_that_is_skipped_leaves_the_buffers_of_all_replicas(folder: Path) -> None:
    odd = functools.partial(Odd, nan_in=5)
    trainer, _ = train(folder / "run", odd, replicas=R, on_nan="skip", steps=6)
    finite = torch.tensor([loss == loss for loss, _ in trainer.objective.terms]).view(6, -1).all(1)
    taken = sum(all(ranks) for ranks in zip(*hc.allgather_object(finite.tolist())))
    assert 0 < taken < 6
    of_replicas = trainer.optimizer.replicas.state_dict()["buffers"].values()
    counted = {int(value) for own in of_replicas for name, value in own.items() if "tracked" in name}
    assert counted == {taken}
    assert all(buffer.isfinite().all() for buffer in trainer.model.buffers())


@pytest.mark.ranks(gloo=(1, 2))
def test_a_resumed_run_has_as_many_replicas_and_warns_of_what_may_change_bits(folder, monkeypatch) -> None:
    train(folder / "run", replicas=R, steps=2)
    with pytest.raises(ConfigError, match="replicas 2: the run that is to resume has 4"):
        train(folder, replicas=2, steps=3, resume=str(folder / "run"))
    if hc.size() == 2:
        with pytest.raises(ConfigError, match="replicas=1 .* not on 2"):
            train(folder / "one", replicas=1)
    others = {**libraries(), "torch": "0.1"}
    monkeypatch.setattr("hvd_ckpt.snapshots.training_state.libraries", lambda: others)
    torch.set_num_threads(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(folder, replicas=R, steps=3, resume=str(folder / "run"))
    told = [str(one.message) for one in caught if "bits" in str(one.message)]
    assert len(told) == (hc.rank() == 0)
    for text in told:
        assert "CPU threads a rank 1 (now 2)" in text and "(now 0.1)" in text
