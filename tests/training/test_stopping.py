"""A run that is asked to stop, or whose loss is nan on one rank: all ranks do the same after the same step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from all_ranks import Poisoned
from same import assert_same
from snapshot_files import read_snapshot

import hvd_ckpt as hc
import hvd_ckpt.reduction.weights
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.app.training.ending import NonFiniteLoss
from hvd_ckpt.app.training.logs import read
from hvd_ckpt.app.training.trainer import Outcome, Trainer
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.lock import FolderLock

pytestmark = pytest.mark.ranks(gloo=(1, 2))

AT, STEPS = 3, 6  # the step that is disturbed
LAST = hc.size() - 1

twice = pytest.mark.ranks(gloo=(2,))  # as much as anywhere


class Disturbed(Trainer):
    """Calls something on the last rank in one step."""

    disturb: Any = None

    def step(self, parts):
        if self.progress.step + 1 == AT and hc.rank() == LAST and self.disturb is not None:
            self.disturb(self)
        return super().step(parts)


def train(folder: Path, disturb: Any = None, poisoned: bool = False, **changes: Any) -> Outcome:
    settings = {"model": "resnet-20", "steps": STEPS, "batch": 4, "pixels": 8, "lr": 1e-2, "eval_batches": 1}
    settings |= {"log_every": 1, "eval_every": 3, **changes}
    trainer: Any = runs.trainer_of(
        folder,
        settings,
        objective=lambda objective: Poisoned(objective, AT) if poisoned else objective,
        kind=Disturbed,
    )
    trainer.disturb = disturb
    return runs.run(trainer)


def state(folder: Path, step: int = STEPS) -> dict[str, Any]:
    read = read_snapshot(folder / "snapshots" / f"step-{step:08}")
    return {"weights": read.weights, "progress": read.replicated["progress"]}


@pytest.fixture(scope="module")
def whole(module_folder: Path) -> Path:
    """The folder of a run that nothing disturbs."""
    train(module_folder / "whole")
    return module_folder / "whole"


@twice
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_nothing_is_lost(whole, folder) -> None:
    number = signal.SIGTERM
    before = signal.getsignal(number)
    stopped = train(folder / "run", lambda trainer: os.kill(os.getpid(), number))
    assert (stopped.steps, stopped.stopped) == (AT, number.name)
    assert signal.getsignal(number) == before

    resumed = train(folder / "run", resume=str(folder / "run"))
    assert (resumed.steps, resumed.stopped) == (STEPS, None)
    assert_same(state(folder / "run"), state(whole))
    if hc.rank() == 0:  # the evaluation that was due where it stopped was made when it resumed
        logs = [(path / "log.jsonl").read_text() for path in (whole, folder / "run")]
        assert [text.count('"eval"') for text in logs] == [2, 2]


@pytest.mark.ranks(gloo=(1,))  # rank 0 looks for it
def test_a_file_stops_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("hvd_ckpt.processes.stopping.LOOK_SECONDS", 0.0)
    run, stop = folder / "run", folder / "run" / "stop"
    outcome = train(run, lambda trainer: stop.touch())
    assert (outcome.stopped, outcome.steps) == ("stop", AT)
    assert not stop.exists()

    stop.touch()
    held = FolderLock(run)
    with pytest.raises(ConfigError, match="is in use by process"):
        train(run, resume=str(run))
    assert stop.exists()  # for the run that is there
    held.release()
    with open(run / "log.jsonl", "ab") as log:
        log.write(b"\0\0\0\n")  # as a machine that loses power may leave it
    outcome = train(run, resume=str(run))  # the file was for a run that has ended
    assert (outcome.stopped, outcome.steps) == (None, STEPS)
    said = capsys.readouterr().err
    assert said.count("Warning: ") == 1 and "line 4: not a record" in said.replace("\n", " ")
    assert [record["step"] for record in read(run / "log.jsonl")] == [3, 4, 5, 6, 6]
    assert len(list(run.glob("log-*.jsonl"))) == 1
    (run / "snapshots" / "step-00000006").rename(folder / "step-00000006")
    with pytest.raises(ConfigError, match="is not in the folder 'snapshots' of a run"):
        train(run, resume=str(folder / "step-00000006"))


@twice
def test_a_loss_that_is_nan_on_one_rank_ends_all_and_without_a_snapshot_the_run_begins_again(whole, folder):
    with pytest.raises(NonFiniteLoss, match=rf"^step {AT}: the loss is nan on rank {LAST}, host \S+: lower"):
        train(folder / "run", poisoned=True)
    assert reader.find(folder / "run" / "snapshots") is None
    warned = pytest.warns(UserWarning, match="has no snapshot yet")
    with warned if hc.rank() == 0 else contextlib.nullcontext():
        train(folder / "run", resume=str(folder / "run"))
    assert_same(state(folder / "run")["weights"], state(whole)["weights"])


@twice
@pytest.mark.parametrize("options", [{"verify": "weights=false,every=2"}, {}], ids=["all", "in steps"])
def test_weights_that_have_drifted_end_all_ranks_and_are_named(folder, options, monkeypatch) -> None:
    monkeypatch.setattr(hvd_ckpt.reduction.weights, "PART_BYTES", 1 << 30)  # all in one part
    monkeypatch.setattr(hvd_ckpt.reduction.weights, "PART_TENSORS", 1000)

    def drift(trainer: Trainer) -> None:
        name, parameter = list(trainer.model.named_parameters())[4]
        with torch.no_grad():
            parameter.flatten()[0] += 1e-6
        drifted.append(name)

    drifted: list[str] = []
    when = "" if options else r" in step \d+ since this optimizer was made \(equal in step \d+\)"
    with pytest.raises(
        hc.WeightsDiffer, match=rf"^parameter '\S+' differs{when}: rank {LAST} \(host \S+\) has"
    ):
        train(folder / "run", drift, **options)
    hc.verify(weights=True)
    assert len(drifted) == (hc.rank() == LAST)


@twice
def test_a_state_that_no_run_could_resume_from_is_not_written(folder, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: {"loss": -math.inf})
    with pytest.raises(SnapshotError, match=r"step 6 was not written, since .*: progress.best is -inf"):
        train(folder / "run")
    assert reader.find(folder / "run" / "snapshots") is None


@twice
def test_a_step_with_a_loss_that_is_nan_is_skipped_on_all_ranks(folder: Path, capsys: Any) -> None:
    train(folder / "run", poisoned=True, on_nan="skip", snapshot_every=1, keep_snapshots=9)
    before, after, later = (state(folder / "run", step)["weights"] for step in (AT - 1, AT, AT + 1))
    assert_same(before, after)
    assert not all(torch.equal(weight, after[name]) for name, weight in later.items())
    assert all(bool(weight.isfinite().all()) for weight in later.values())
    if hc.rank() == 0:
        said = f"Warning: step {AT}: the loss is nan on rank {LAST}, host"
        assert capsys.readouterr().err.count(said) == 1
