"""Sharded runs: lossy wires and offloading resumed, short last batches, and what cannot be split. Other layouts: tests/faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs import final_weights
from same import assert_same
from snapshot_files import opened_files

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.app.training.trainer import Outcome, Trainer

pytestmark = pytest.mark.ranks(gloo=(2,))


SMALL = {"width": 32, "layers": 3, "heads": 2, "dropout": 0.1}


@pytest.fixture(scope="module")
def shared(module_folder: Path) -> Path:
    """A folder for the whole module, with a text."""
    if hc.rank() == 0:
        (module_folder / "text.txt").write_bytes(bytes(range(32, 127)) * 60)
    hc.barrier()
    return module_folder


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    values: dict[str, Any] = {"model": "gpt-tiny", "model_options": SMALL, "sequence_length": 16}
    values.update(data=f"text:{folder / 'text.txt'}", bucket_cap_mb=0.02, keep_snapshots=9, segments=3)
    values.update(batch=4, accumulate=2, lr=1e-2, ema=0.8, schedule="constant", eval_batches=1)
    values.update(changes)
    if values.get("shard") in (2, 3):
        values["shard"] = f"{values['shard']},accumulate_locally=true"
    return runs.trainer_of(folder, values)


def train(folder: Path, **changes: Any) -> Outcome:
    return runs.run(trainer_of(folder, **changes))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lossy_wire_and_offloaded_state_are_resumed_bit_for_bit(
    stage: int, shared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank reads the shards of the weights for all."""
    offload = "parameters" if stage == 3 else "optimizer"
    shard = f"{stage},wire=int8,offload={offload},folder={folder}"
    values: dict[str, Any] = {"shard": shard, "clip": 0.5, "verify": "every=1"}
    whole = train(shared, **values, output=str(folder / "run"), steps=4, snapshot_every=2)
    weights = final_weights(whole)
    with opened_files(monkeypatch) as counts:
        again = train(shared, **values, resume=str(whole.folder / "snapshots" / "step-00000002"), steps=4)
    assert counts[f"rank-0000{hc.rank()}.safetensors"]
    assert (counts[f"rank-0000{1 - hc.rank()}.safetensors"] > 0) == (hc.rank() == 0)
    assert_same(weights, final_weights(again))
    assert whole.evaluation == again.evaluation


def test_ranks_with_fewer_batches_keep_step_and_a_skipped_step_leaves_nothing(
    shared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last batch of three samples, three samples to evaluate on one by one, and a loss that is nan on one rank."""
    if hc.rank() == 0:
        (folder / "text.txt").write_bytes((shared / "text.txt").read_bytes()[: 16 * 14 + 1])
    hc.barrier()
    outcomes = []
    for stage in (0, 3):
        values: dict[str, Any] = {"epochs": 1, "accumulate": 4, "validation_split": 0.22, "optimizer": "sgd"}
        values.update(shard=stage, on_nan="skip", eval_batches=None)
        values["model_options"] = {**SMALL, "dropout": 0.0}  # stage 3 takes fewer micro-batches at the end
        trainer = trainer_of(folder, **values, output=str(folder / f"run-{stage}"))
        assert trainer.test is not None and (len(trainer.train), len(trainer.test)) == (11, 3)
        loss: Any = trainer.objective.loss
        calls: list[int] = []

        def spoilt(*arguments: Any, loss: Any = loss, calls: list[int] = calls) -> Any:
            calls.append(1)
            return loss(*arguments) * (float("nan") if len(calls) == 2 and hc.rank() == 1 else 1.0)

        monkeypatch.setattr(trainer.objective, "loss", spoilt)
        outcomes.append(runs.run(trainer))
    for outcome in outcomes[1:]:
        assert outcome.steps == 2 and outcome.evaluation == pytest.approx(outcomes[0].evaluation)
        torch.testing.assert_close(final_weights(outcome), final_weights(outcomes[0]))


def test_state_that_cannot_be_split_or_does_not_fit_is_an_error_on_every_rank(
    shared: Path, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^shard optimizer: .*[Aa]dafactor"):
        trainer_of(shared, output=str(folder / "run"), shard=1, optimizer="adafactor", weight_decay=0.0)
    run = train(shared, output=str(folder / "other"), steps=1, shard=3)
    with pytest.raises(ConfigError, match="the snapshot is of another model"):
        trainer_of(shared, resume=str(run.folder), shard=3, model_options={**SMALL, "layers": 2}, segments=2)
    last = run.folder / "snapshots" / "step-00000001"
    if hc.rank() == 0:
        part = last / "rank-00001.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"\1")
    hc.barrier()
    with pytest.raises(ConfigError, match="rank-00001.safetensors: its content is not what was written"):
        trainer_of(shared, resume=str(last), shard=3)
