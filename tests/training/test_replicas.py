"""``hvd-ckpt train --replicas``: what belongs to a replica, in runs that are resumed, skip a step, or change what shapes bits."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

import hvd_ckpt as hc
from hvd_ckpt.app.training import logs
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.app.training.modes import Plain
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.snapshots.schema import libraries

pytestmark = pytest.mark.ranks(gloo=(1, 2))

R = 4


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


def train(folder: Path, nan_in: int = 0, **changes: Any) -> tuple[Trainer, Odd]:
    settings = {"model": "resnet-20", "steps": 4, "batch": 2, "pixels": 8, "replicas": R}
    settings |= {"eval_batches": 1, "log_every": 1, **changes}
    trainer: Any = runs.trainer_of(folder, settings, objective=lambda objective: Odd(objective, nan_in))
    runs.run(trainer)
    return trainer, trainer.objective


def test_a_logged_loss_is_the_mean_over_all_terms_of_all_replicas(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the mean of the losses that the backward passes of replicas begin with."""
    begun: list[float] = []
    backward = Plain._backward

    def noted(self: Plain, loss: torch.Tensor, last: bool) -> None:
        begun.append(loss.item())
        backward(self, loss, last)

    monkeypatch.setattr(Plain, "_backward", noted)
    _, objective = train(folder / "run", steps=1)
    losses, weights = zip(*itertools.chain(*hc.allgather_object(objective.terms)))
    assert len(losses) == R
    expected = sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)
    assert logs.read(folder / "run" / "log.jsonl")[0]["loss"] == pytest.approx(expected, rel=1e-9)
    everyone = list(itertools.chain(*hc.allgather_object(begun)))
    assert sum(everyone) / R == pytest.approx(expected, rel=1e-5)


def test_a_step_that_is_skipped_leaves_the_buffers_of_all_replicas(folder: Path) -> None:
    trainer, objective = train(folder / "run", nan_in=5, on_nan="skip", steps=6)
    finite = torch.tensor([loss == loss for loss, _ in objective.terms]).view(6, -1).all(1)
    taken = sum(all(ranks) for ranks in zip(*hc.allgather_object(finite.tolist())))
    assert 0 < taken < 6
    of_replicas = trainer.optimizer.replicas.state_dict()["buffers"].values()
    counted = {int(value) for own in of_replicas for name, value in own.items() if "tracked" in name}
    assert counted == {taken}
    assert all(buffer.isfinite().all() for buffer in trainer.model.buffers())


def test_a_resumed_run_has_as_many_replicas_and_warns_of_what_may_change_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(folder / "run", steps=2)
    with pytest.raises(ConfigError, match="replicas 2: the run that is to resume has 4"):
        train(folder, replicas=2, resume=str(folder / "run"))
    if hc.size() == 2:
        with pytest.raises(ConfigError, match="replicas=1 .* not on 2"):
            train(folder / "one", replicas=1)
    others = {**libraries(), "torch": "0.1"}
    monkeypatch.setattr("hvd_ckpt.snapshots.training_state.libraries", lambda: others)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(folder, steps=3, resume=str(folder / "run"))
    finally:
        torch.set_num_threads(threads)
    told = [str(one.message) for one in caught if "bits" in str(one.message)]
    assert len(told) == (hc.rank() == 0)
    for text in told:
        assert f"CPU threads a rank {threads} (now {threads + 1})" in text and "(now 0.1)" in text
