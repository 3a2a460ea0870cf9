"""Parts of the training room on ranks: evaluations, commits of elastic runs, errors of one rank, and trials of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch.elastic import TorchState
from same import same
from snapshot_files import state_of
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.training import trial
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.app.training.elastic import committed
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.evaluation import evaluate
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.objectives import IGNORED, Batch, NextOrHiddenToken
from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.snapshots import Snapshots

pytestmark = pytest.mark.ranks(gloo=(2,))


# ------------------------------------------------------------------------------------ evaluations


class Tokens:
    """Samples of 3 tokens, whose targets are ignored up to sample ``first``."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 9  # one rank of two has one more than the other

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        numbers = torch.tensor(list(indices))[:, None].expand(-1, 3)
        return Batch((numbers,), torch.where(numbers < self.first, IGNORED, numbers % 5))


class MeanOfTerms(NextOrHiddenToken):
    """A loss that is nan where there are no terms, as PyTorch's own is."""

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten())


@pytest.mark.ranks(gloo=(1, 2))
@pytest.mark.parametrize("objective", [NextOrHiddenToken(), MeanOfTerms()])
@pytest.mark.parametrize("first", [0, 4, 9])
def test_samples_without_targets_do_not_count(objective: NextOrHiddenToken, first: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Embedding(9, 5).train(first > 0), Tokens(first)
    shard = SimpleNamespace(stage=3 * (first == 0))
    run: Any = SimpleNamespace(
        model=model,
        test=data,
        objective=objective,
        average=None,
        config=SimpleNamespace(micro_batch=2, eval_batches=None, shard=shard),
        mode=SimpleNamespace(parts=1),
        device=torch.device("cpu"),
        precision=SimpleNamespace(autocast=contextlib.nullcontext),
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = evaluate(run)
    told = sum("no target that counts" in str(one.message) for one in heard)
    assert told == (first == len(data) and hc.rank() == 0)
    if first == len(data):
        assert all(math.isnan(value) for name, value in found.items() if name != "samples")
    else:
        rest = data.batch(range(first, len(data)), [])
        expected = nn.functional.cross_entropy(model(*rest.inputs).flatten(0, 1), rest.targets.flatten())
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["samples"] == len(data) and model.training == (first > 0)
    hc.barrier()


# ------------------------------------------------------------------------------------ commits and errors


def test_a_commit_stays_as_it_was_taken() -> None:
    """After a change of ranks: test_elastic.py, tests/faults."""

    def state() -> dict[str, Any]:
        weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
        weights = {"weight": weight.to(memory_format=torch.channels_last), "half": weight.bfloat16()}
        weights |= {"count": torch.tensor(1), "none": torch.empty(0, 7)}
        replicated = {"options": ({"means": (weight + 1,), "seen": weight > 0},), "lr": (1, 0.5)}
        return {"weights": weights, "replicated": replicated}

    values = state()
    saved = state_of(**values, per_rank={"optimizer": None})
    trainer: Any = SimpleNamespace(folder=Path("/run"), progress=SimpleNamespace(step=7), state=lambda: saved)
    run = TorchState(point=committed(trainer))
    values["weights"]["weight"].zero_()
    values["replicated"]["options"][0]["means"][0].zero_()
    values["replicated"].clear()
    for _ in range(2):
        run.restore()
        made = dataclasses.replace(run.point.snapshot)  # as a trainer reads it
        assert same({"weights": made.weights, "replicated": made.replicated}, state())
        made.replicated["options"][0]["means"][0].zero_()  # as an optimizer does


def test_an_error_of_one_rank_is_raised_on_all_ranks() -> None:
    def lack_text() -> None:
        with errors_everywhere("test.errors"):
            if hc.rank() == hc.size() - 1:
                raise ConfigError("no text here")

    with pytest.raises(ValueError, match="no text here"):
        lack_text()


# ------------------------------------------------------------------------------------ trials

SETTINGS: dict[str, Any] = {"model": "gpt-tiny", "model_options": {"layers": 1, "width": 32}}
SETTINGS |= {"sequence_length": 16, "batch": 2}
NOT_IN_A_STEP = {"warmup": 1000, "profile": "500:501", "callback": "there_is_no:Tracker", "tensorboard": True}
NOT_IN_A_STEP |= {"epochs": 1, "dry_run": True, "resume": "there-is-none"}
BeforeStep = Callable[[Callable[[Trainer], None]], None]


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> BeforeStep:
    """Calls a function before each step; no snapshot may be begun."""
    step = Trainer.step

    def insert(function: Callable[[Trainer], None]) -> None:
        def after_it(trainer: Trainer, parts: Any) -> Any:
            function(trainer)
            return step(trainer, parts)

        monkeypatch.setattr(Trainer, "step", after_it)

    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a snapshot was begun")

    monkeypatch.setattr(Snapshots, "begin", never)
    return insert


def compared(*batches: int, **layout: int) -> list[Any]:
    candidates = [{**SETTINGS, "batch": batch, **layout} for batch in batches]
    return trial.compared(candidates, [0] * len(batches), 1 << 40, lambda settings: None, steps=1)


def test_a_trial_leaves_out_what_is_not_in_a_step(before_step: BeforeStep) -> None:
    found = trial.trial({**SETTINGS, **NOT_IN_A_STEP}, steps=1)
    assert found.seconds > 0 and found.peak > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_all_trials(before_step: BeforeStep, number: signal.Signals) -> None:
    def stop(trainer: Trainer) -> None:
        if trainer.config.batch == 1 and trainer.progress.step == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), number)

    before_step(stop)
    found = compared(2, 1, 4)
    assert isinstance(found[0], trial.Trial) and found[1:] == [trial.NOT_TRIED] * 2


@pytest.mark.parametrize(
    ("layout", "in_round"), [({}, 0), ({}, 1), ({"pipeline": 2}, 0), ({"tensor": 2}, 0)], ids=str
)
def test_a_candidate_for_which_one_rank_has_no_memory_is_refused(before_step, layout, in_round) -> None:
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
    found = compared(1, 2, **layout)
    assert isinstance(found[0], trial.Trial) and found[1] == trial.OUT_OF_MEMORY


def test_a_candidate_whose_loss_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = NextOrHiddenToken.loss

    def spoilt(self: Any, output: Any, batch: Batch) -> torch.Tensor:
        return loss(self, output, batch) * (math.nan if len(batch) == 2 else 1.0)

    monkeypatch.setattr(NextOrHiddenToken, "loss", spoilt)
    found = compared(2, 1)
    assert "step 1: the loss is nan on rank 0" in str(found[0]) and isinstance(found[1], trial.Trial)
