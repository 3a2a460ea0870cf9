"""Trials: some steps of a run, without its output, of several settings in turn."""

from __future__ import annotations

import math
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvd_ckpt.app.training import trial
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.objectives import NextOrHiddenToken
from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.snapshots import Snapshots

pytestmark = pytest.mark.ranks(gloo=(2,))
SETTINGS: dict[str, Any] = {
    "model": "gpt-tiny",
    "model_options": {"layers": 1, "width": 32},
    "sequence_length": 16,
    "batch": 2,
}
NOT_IN_A_STEP = {
    "warmup": 1000,
    "profile": "500:501",
    "callback": "there_is_no:Tracker",
    "tensorboard": True,
    "epochs": 1,
    "dry_run": True,
    "resume": "there-is-none",
}


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Trainer], None]], None]:
    """Calls a function before each step."""
    step = Trainer.step

    def insert(function: Callable[[Trainer], None]) -> None:
        def after_it(trainer: Trainer, parts: Any) -> Any:
            function(trainer)
            return step(trainer, parts)

        monkeypatch.setattr(Trainer, "step", after_it)

    return insert


def never(*arguments: Any, **more: Any) -> None:
    raise AssertionError("a snapshot was begun")


@pytest.mark.parametrize("name", NOT_IN_A_STEP)
def test_a_setting_of_what_is_not_in_a_step_is_left_out(name: str) -> None:
    found = trial.trial({**SETTINGS, name: NOT_IN_A_STEP[name]}, steps=1)
    assert found.seconds > 0 and found.peak > 0


def test_a_trial_writes_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "begin", never)
    trial.trial(SETTINGS, steps=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_all_trials(
    before_step: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(Snapshots, "begin", never)

    def stop(trainer: Trainer) -> None:
        if trainer.config.batch == 1 and trainer.progress.step == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), number)

    before_step(stop)
    candidates = [{**SETTINGS, "batch": batch} for batch in (2, 1, 4)]
    found = trial.compared(candidates, [0, 0, 0], 1 << 40, lambda settings: None, steps=1)
    assert isinstance(found[0], trial.Trial) and found[1:] == [trial.NOT_TRIED] * 2


@pytest.mark.parametrize(
    ("layout", "in_round"), [({}, 0), ({}, 1), ({"pipeline": 2}, 0), ({"tensor": 2}, 0)], ids=str
)
def test_a_candidate_for_which_one_rank_has_no_memory_is_refused(
    before_step: Any, layout: dict[str, int], in_round: int
) -> None:
    """Also if it had enough in an earlier round."""
    trained: list[Any] = []

    def fail(trainer: Trainer) -> None:
        if trainer.config.batch != 2:
            return
        if trainer.progress.step == 0:
            assert not any(model() for model in trained), "the model of a trial is still there"
            trained.append(weakref.ref(trainer.model))
        if (trainer.progress.step, len(trained), current().number) == (1, 1 + in_round, 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    before_step(fail)
    candidates = [{**SETTINGS, "batch": batch, **layout} for batch in (1, 2)]
    found = trial.compared(candidates, [0, 0], 1 << 40, lambda settings: None, steps=1)
    assert isinstance(found[0], trial.Trial) and found[1] == trial.OUT_OF_MEMORY


def test_a_candidate_whose_loss_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = NextOrHiddenToken.loss
    monkeypatch.setattr(
        NextOrHiddenToken,
        "loss",
        lambda self, output, batch: loss(self, output, batch) * (math.nan if len(batch) == 2 else 1.0),
    )
    candidates = [{**SETTINGS, "batch": batch} for batch in (2, 1)]
    found = trial.compared(candidates, [0, 0], 1 << 40, lambda settings: None, steps=1)
    assert "step 1: the loss is nan on rank 0" in str(found[0]) and isinstance(found[1], trial.Trial)
