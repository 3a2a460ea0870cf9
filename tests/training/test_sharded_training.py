"""Runs whose state is split over the ranks: the bits of a run that splits nothing, stopped and gone on with at any stage."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hvd_ckpt as hc
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.consolidate import consolidate
from hvd_ckpt.training.build import assemble
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.trainer import Outcome, Trainer

pytestmark = pytest.mark.ranks(gloo=(2,))


SMALL = {"width": 32, "layers": 3, "heads": 2, "dropout": 0.1}
STEPS = 7


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder for the whole module, with a text."""
    made = hc.broadcast_object(tempfile.mkdtemp(prefix="hvd_ckpt_sharded_") if hc.rank() == 0 else "", 0)
    folder = Path(made)
    if hc.rank() == 0:
        (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 60)
    hc.barrier()
    yield folder
    hc.barrier()
    if hc.rank() == 0:
        shutil.rmtree(folder)


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    values = {
        "model": "gpt-tiny",
        "model_options": SMALL,
        "text": str(folder / "text.txt"),
        "length": 16,
        "batch": 4,
        "accumulate": 2,
        "lr": 1e-2,
        "ema": 0.8,
        "schedule": "constant",
        "eval_batches": 1,
        "segments": 3,
        "keep_snapshots": 9,
        "bucket_cap_mb": 0.02,
        **changes,
    }
    if int(values.get("shard", 0)) >= 2:
        values["accumulate_locally"] = values.get("accumulate_locally", True)
    config = Config.make(values)
    parts = assemble(config)
    return Trainer(config, parts.model, parts.objective, parts.train, parts.test)


def train(folder: Path, **changes: Any) -> Outcome:
    outcome = trainer_of(folder, **changes).run()
    hc.barrier()  # rank 0 removes old snapshots at the end
    return outcome


def last(outcome: Outcome) -> Path:
    found = reader.newest(outcome.folder / "snapshots")
    assert found is not None and found.name == f"step-{outcome.steps:08}"
    return found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert torch.equal(one, theirs[name]), name


def averages(outcome: Outcome, file: Path) -> dict[str, torch.Tensor]:
    """The averaged weights of a run's last snapshot, on rank 0; the weights go to a file beside."""
    if hc.rank() != 0:
        return {}
    consolidate(last(outcome), file, ema=True)
    consolidate(last(outcome), file.with_name(f"{file.name}-raw"))
    return load_file(file)


def state_by_name(trainer: Trainer) -> dict[str, dict[str, Any]] | None:
    """The whole optimizer state, on rank 0."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    if trainer.config.stage:
        whole = trainer.optimizer.full_state_dict()
        parameters = [one for group in trainer.optimizer._sharding.groups for one in group]
    else:
        whole = trainer.optimizer.state_dict()
        parameters = [one for group in trainer.optimizer.param_groups for one in group["params"]]
    return whole and {names[one]: whole["state"][number] for number, one in enumerate(parameters)}


@pytest.fixture(scope="module")
def unsharded(shared: Path) -> Outcome:
    return train(shared, output=str(shared / "unsharded"), steps=STEPS, snapshot_every=2)


def test_a_run_that_changes_its_stage_at_each_step_ends_in_the_bits_of_one_that_splits_nothing(
    shared: Path, unsharded: Outcome, folder: Path
) -> None:
    """A step at stage 0, one at 2, ...: each goes on from the snapshot that the one before wrote."""
    first = train(shared, output=str(folder / "run"), steps=1, shard=0)
    for step, stage in enumerate((2, 3, 1, 3, 0, 1), 2):
        outcome = train(shared, resume=str(first.folder), steps=step, shard=stage)
        found = reader.read(last(outcome))
        assert (found.sharding.stage if found.sharding else 0) == stage
    assert outcome.steps == STEPS and outcome.evaluation == unsharded.evaluation
    assert_same(reader.read(last(outcome)).weights, reader.read(last(unsharded)).weights)
    assert_same(averages(outcome, folder / "ours"), averages(unsharded, folder / "theirs"))
    if hc.rank() == 0:
        raw, ema = load_file(folder / "ours-raw"), load_file(folder / "ours")
        assert raw.keys() == ema.keys() and not any(torch.equal(raw[name], ema[name]) for name in raw)


@pytest.mark.parametrize("stage", [2, 3])
def test_background_snapshots_hold_weights_and_state_bit_for_bit_for_every_stage(
    stage: int, shared: Path, unsharded: Outcome, folder: Path
) -> None:
    outcome = train(shared, output=str(folder / "run"), steps=3, shard=stage, snapshot_every=2)
    step_2 = outcome.folder / "snapshots" / "step-00000002"
    expected = reader.read(unsharded.folder / "snapshots" / "step-00000002")
    assert_same(reader.read(step_2).weights, expected.weights)
    if hc.rank() == 0:
        consolidate(step_2, folder / "whole.safetensors")
        whole = load_file(folder / "whole.safetensors")
        assert_same(whole, expected.weights)
    trainers = [trainer_of(shared, resume=str(step_2), shard=other, steps=9) for other in (0, 1, 3)]
    names = [name for name, _ in trainers[0].model.named_parameters()]
    for states in zip(
        *(hc.broadcast_object(state_by_name(one), 0, name="state").items() for one in trainers)
    ):
        (name, state), *others = states
        assert name == names.pop(names.index(name)) and set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(state["step"]) == 2
        for other_name, other in others:
            assert other_name == name
            assert_same(state, other)
    assert not names


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lossy_wire_and_offloaded_state_go_on_bit_for_bit(stage: int, shared: Path, folder: Path) -> None:
    values: dict[str, Any] = {
        "shard": stage,
        "wire": "int8",
        "offload": "optimizer",
        "offload_folder": str(folder),
        "clip": 0.5,
        "check_weights": 1,
        "accumulate_locally": False,
    }
    whole = train(shared, **values, output=str(folder / "run"), steps=4, snapshot_every=2)
    weights = reader.read(last(whole)).weights
    again = train(shared, **values, resume=str(whole.folder / "snapshots" / "step-00000002"), steps=4)
    assert_same(weights, reader.read(last(again)).weights)
    assert whole.evaluation == again.evaluation


def test_ranks_with_fewer_batches_keep_step_and_a_skipped_step_leaves_nothing(
    shared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last batch of three samples, three samples to evaluate on one by one, and a loss that is nan on one rank."""
    if hc.rank() == 0:
        (folder / "text.txt").write_bytes((shared / "text.txt").read_bytes()[: 16 * 14 + 1])
    hc.barrier()
    outcomes = []
    for stage in (0, 2, 3):
        values: dict[str, Any] = {
            "epochs": 1,
            "accumulate": 4,
            "held_out": 0.22,
            "eval_batches": None,
            "optimizer": "sgd",
        }
        values["model_options"] = {**SMALL, "dropout": 0.0}  # stage 3 takes fewer micro-batches at the end
        trainer = trainer_of(
            folder, **values, output=str(folder / f"run-{stage}"), shard=stage, on_nan="skip"
        )
        assert trainer.test is not None and (len(trainer.train), len(trainer.test)) == (11, 3)
        loss: Any = trainer.objective.loss
        calls: list[int] = []

        def spoilt(*arguments: Any, loss: Any = loss, calls: list[int] = calls) -> Any:
            calls.append(1)
            return loss(*arguments) * (float("nan") if len(calls) == 2 and hc.rank() == 1 else 1.0)

        monkeypatch.setattr(trainer.objective, "loss", spoilt)
        outcomes.append(trainer.run())
        hc.barrier()
    for outcome in outcomes[1:]:
        assert outcome.steps == 2 and outcome.evaluation == pytest.approx(outcomes[0].evaluation)
        torch.testing.assert_close(reader.read(last(outcome)).weights, reader.read(last(outcomes[0])).weights)


def test_what_cannot_be_split_is_an_error_on_every_rank(
    shared: Path, unsharded: Outcome, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^shard optimizer: .*[Aa]dafactor"):
        trainer_of(shared, output=str(folder / "run"), shard=1, optimizer="adafactor", weight_decay=0.0)
    run = train(shared, output=str(folder / "other"), steps=1, shard=3)
    with pytest.raises(ConfigError, match="the snapshot is of another model"):
        trainer_of(shared, resume=str(run.folder), shard=3, model_options={**SMALL, "layers": 2}, segments=2)
    if hc.rank() == 0:
        part = last(run) / "shard-00001.pt"
        part.write_bytes(part.read_bytes()[:-1] + b"\1")
    hc.barrier()
    with pytest.raises(ConfigError, match="shard-00001.pt: its content is not what was written"):
        trainer_of(shared, resume=str(last(run)), shard=3)
