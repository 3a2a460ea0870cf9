"""Training runs as the command makes them: recomputed, planned, sharded, resumed; data, logs, callbacks and errors.

Other layouts: tests/faults.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import runs
import torch
from all_ranks import Poisoned
from runs import MODELS, SMALL, final_weights, settings, write_text
from same import assert_same
from snapshot_files import opened_files, read_snapshot

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.logs import read
from hvd_ckpt.app.training.trainer import Outcome, Trainer
from hvd_ckpt.data.sampler import DistributedSampler

pytestmark = [pytest.mark.ranks(gloo=(2,)), pytest.mark.usefixtures("quick_planner")]

STEP_2, STEP_4 = "snapshots/step-00000002", "snapshots/step-00000004"


@pytest.fixture(scope="module")
def text(module_folder: Path) -> Path:
    return write_text(module_folder)


def train(folder: Path, recording: bool = False, poisoned: int = 0, **values: Any) -> tuple[Trainer, Outcome]:
    """The trainer of a run that has ended; with data that record, or a loss that is nan on the last rank in one pass."""
    trainer: Any = runs.trainer_of(
        folder,
        values,
        objective=lambda objective: Poisoned(objective, poisoned) if poisoned else objective,
        data=lambda data: Recording(data) if recording else data,
    )
    if recording:
        trainer.train.asked.clear()  # the summary of the run has looked at a sample
    return trainer, runs.run(trainer)


# ------------------------------------------------------------------------------------ recomputed, sharded, resumed


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_and_planned_runs_end_in_the_bits_of_one_that_keeps_everything(name, text, folder) -> None:
    values = settings(name, text, accumulate=2)
    kept, outcome = train(folder / "kept", **values)
    weights = final_weights(outcome)
    segments, recomputed = train(folder / "segments", **values, segments=3)
    assert_same(weights, final_weights(recomputed))
    assert outcome.evaluation == recomputed.evaluation
    trainers = [kept, segments]
    if name == "gpt-tiny":
        cached = {**values, "budget": f"min,cache={folder / 'plans'}"}
        planned, within = train(folder / "plan", **cached)
        trainers.append(planned)
        assert_same(weights, final_weights(within))
        assert any(block.policy.selective is not None for block in planned.plan.blocks)
        file = str(folder / "plan" / "plan.json") if hc.rank() == 0 else "a file that this host lacks"
        loaded, again = train(folder / "again", **values, plan=file)
        assert_same(weights, final_weights(again))
        found, _ = train(folder / "found", **cached, seed=7)
        assert loaded.plan == found.plan == planned.plan
        reentrant = final_weights(train(folder / "reentrant", **values, segments="3,reentrant=true")[1])
        torch.testing.assert_close(weights, reentrant, rtol=1e-3, atol=1e-5)
    for trainer in trainers:
        stats = trainer.optimizer.reduction_stats
        assert set(stats.launches.values()) == {3} and stats.late_gradients == 0


@pytest.mark.ranks(gloo=(1, 2), mpi=(2,))
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.ranks(gloo=(2,)))])
def test_a_run_that_is_resumed_ends_in_the_bits_of_one_never_stopped(precision, text, folder) -> None:
    """In half precision with a plan, too, which the snapshot holds; and then with changed settings."""
    values = settings("gpt-tiny", text, steps=4, precision=precision, schedule="cosine", warmup=2, clip=0.5)
    values.update(eval_every=2, snapshot_every=2, keep_snapshots=5, log_every=1, accumulate=2)
    if precision == "fp16":
        values.update(budget="min", log_every=4)  # a log entry is open at the snapshot
    first, outcome = train(folder / "whole", **values)
    if hc.rank() == 0:
        shutil.copytree(folder / "whole", folder / "stopped")
        shutil.rmtree(folder / "stopped" / STEP_4)
    hc.barrier()
    again, resumed = train(folder, **values, resume=str(folder / "stopped"))
    assert resumed.folder == folder / "stopped" and again.plan == first.plan
    assert_same(final_weights(outcome), final_weights(resumed))
    one, other = (read_snapshot(folder / run / STEP_4, hc.rank()) for run in ("whole", "stopped"))
    assert torch.equal(one.per_rank["random"]["torch"], other.per_rank["random"]["torch"])
    assert one.replicated["progress"] == other.replicated["progress"]
    one, other = (
        [(record["step"], record["kind"], record["loss"]) for record in read(folder / run / "log.jsonl")]
        for run in ("whole", "stopped")
    )
    assert one == other
    if precision == "fp16":
        changes = {"budget": "0.9x", "lr": 0.5, "weight_decay": 0.25, "steps": 5}
        changed, _ = train(folder, **{**values, **changes}, resume=str(folder / "stopped"))
        assert changed.plan is not None and changed.plan.budget != first.plan.budget
        assert changed.optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lossy_wire_and_offloaded_state_are_resumed_bit_for_bit(stage, text, folder, monkeypatch) -> None:
    """The first rank reads the shards of the weights for all; and what does not fit a run in shards."""
    offload = "parameters" if stage == 3 else "optimizer"
    shard = f"{stage},wire=int8,offload={offload},folder={folder}"
    values = settings("gpt-tiny", text, shard=shard, clip=0.5, verify="every=1", bucket_cap_mb=0.02, ema=0.8)
    values.update(accumulate=2, segments=3, steps=4, snapshot_every=2, keep_snapshots=9)
    _, whole = train(folder / "run", **values)
    with opened_files(monkeypatch) as counts:
        _, again = train(folder, **values, resume=str(folder / "run" / STEP_2))
    assert counts[f"rank-0000{hc.rank()}.safetensors"]
    assert (counts[f"rank-0000{1 - hc.rank()}.safetensors"] > 0) == (hc.rank() == 0)
    assert_same(final_weights(whole), final_weights(again))
    assert whole.evaluation == again.evaluation
    if stage == 2:
        return
    smaller = {**values, "model_options": {**SMALL, "layers": 2}, "segments": 2}
    with pytest.raises(ConfigError, match="the snapshot is of another model"):
        train(folder, **smaller, resume=str(folder / "run"))
    part = folder / "run" / STEP_4 / "rank-00001.safetensors"
    if hc.rank() == 0:
        part.write_bytes(part.read_bytes()[:-1] + b"\1")
    hc.barrier()
    with pytest.raises(ConfigError, match="rank-00001.safetensors: its content is not what was written"):
        train(folder, **values, resume=str(folder / "run" / STEP_4))


def test_frozen_layers_stay_and_blocks_have_rates_of_their_own_sharded_and_resumed(text, folder) -> None:
    values = settings(
        "gpt-tiny", text, steps=4, freeze="embedding.*,*.bias", layer_decay=0.5, ema=0.5, snapshot_every=2
    )
    values.update(eval_every=2, keep_snapshots=9, segments=2, model_options={**SMALL, "tied": False})
    start = {name: one.clone() for name, one in assemble(Config(**values)).model.state_dict().items()}
    trainer, outcome = train(folder / "whole", **values)
    for name, weight in final_weights(outcome).items():
        frozen = name.startswith("embedding.") or name.endswith(".bias")
        assert torch.equal(weight, start[name]) == frozen, name
    blocks = len(trainer.model)
    rates = {group["lr"] / trainer.schedule.rate(3) for group in trainer.optimizer.param_groups}
    assert rates == {0.5 ** (blocks - 1 - block) for block in range(1, blocks)}
    assert outcome.evaluation["ema_loss"] != outcome.evaluation["loss"]
    _, sharded = train(folder / "sharded", **values, shard=3)
    _, again = train(folder, **values, shard=3, resume=str(folder / "whole" / STEP_2))
    assert outcome.evaluation == sharded.evaluation == again.evaluation
    for changed in ({"freeze": "embedding.*"}, {"layer_decay": None}):
        with pytest.raises(ConfigError, match=f"{next(iter(changed))} .*: the run that is to resume has"):
            train(folder, **{**values, **changed}, resume=str(folder / "whole"))


# ------------------------------------------------------------------------------------ data


def test_batch_norms_over_all_ranks_agree_also_in_a_short_last_batch(text: Path, folder: Path) -> None:
    count = 4 * hc.size() + 3  # two samples on one rank, one on the other
    arrays = folder / "images.npz"
    if hc.rank() == 0:
        images = numpy.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(numpy.uint8)
        numpy.savez(arrays, images=images, labels=numpy.arange(count) % 3)
    hc.barrier()
    values = settings("resnet-20", text, data=f"images:{arrays}", steps=None, epochs=1, validation_split=0)
    for kind in ("synchronized", "deferred-ranks"):
        trainer, outcome = train(folder / kind, **values, accumulate=4, batch_norm=kind, seed=2**62)
        assert outcome.steps == 2 and trainer.progress.position == count
        first, *others = hc.allgather_object(dict(trainer.model.named_buffers()))
        for other in others:
            assert_same(first, other)


class Recording:
    """A data set that remembers what it was asked for."""

    def __init__(self, data: Any) -> None:
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def batch(self, indices, epoch):
        self.asked.append(list(zip(epoch, indices)))
        return self.data.batch(indices, epoch)

    def asked_of_all(self):
        return [one for rank in hc.allgather_object(self.asked) for batch in rank for one in batch]


@pytest.mark.ranks(gloo=(2, 4))
def test_each_sample_is_trained_on_once_by_one_rank_and_short_last_batches_count_right(folder) -> None:
    """Three epochs, and three samples in the last global batch: two ranks share them unevenly, one of four has none."""
    count = 2 * hc.size() + 1
    values = settings("gpt-tiny", write_text(folder, 8 * count + 1), epochs=3, batch=2)
    values.update(sequence_length=8, optimizer="sgd", weight_decay=0, steps=None, validation_split=0)
    values["model_options"] = {**SMALL, "dropout": 0.0}
    trainer, outcome = train(folder / "run", recording=True, **values)
    assert 3 * count % (2 * hc.size()) == 3
    assert outcome.steps == -(-3 * count // (2 * hc.size())) and outcome.evaluation == {}

    # One process that has every global batch to itself takes the same steps, to rounding.
    config = Config(**values, output=str(folder / "run"))
    alone = assemble(config)
    assert len(alone.train) == count and alone.test is None
    optimizer = torch.optim.SGD(alone.model.parameters(), lr=config.lr)
    order = DistributedSampler(count, seed=config.seed, epochs=3)
    drawn = []
    for step in range(outcome.steps):
        indices, epochs = order.part(2 * hc.size() * step, 2 * hc.size(), 0, 1)
        drawn += zip(epochs, indices)
        batch = alone.train.batch(indices, epochs)
        trainer.schedule.apply(optimizer, step)
        optimizer.zero_grad()
        alone.objective.loss(alone.model(*batch.inputs), batch).backward()
        optimizer.step()
    seen = trainer.train.asked_of_all()
    assert sorted(drawn) == sorted((epoch, index) for epoch in range(3) for index in range(count))
    assert set(seen) == set(drawn)
    assert len(seen) - len(drawn) < hc.size()  # a rank without a sample runs with one that counts nothing
    ours, theirs = (list(model.parameters()) for model in (trainer.model, alone.model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_resumed_epoch_with_another_global_batch_ends_at_the_end_of_the_stream(folder) -> None:
    """As with another number of ranks: the rest of the samples is trained on, each once."""
    count = 8 * hc.size() + 1
    values = settings("gpt-tiny", write_text(folder, 8 * count + 1), epochs=1, batch=2)
    values.update(sequence_length=8, steps=None, validation_split=0, snapshot_every=1, keep_snapshots=99)
    train(folder / "run", **values)
    values["batch"] = 1
    resumed = str(folder / "run" / "snapshots" / "step-00000001")
    trainer, outcome = train(folder, recording=True, **values, resume=resumed)
    left = count - 2 * hc.size()
    assert outcome.steps == 1 + -(-left // hc.size()) and trainer.progress.position == count
    indices, epochs = trainer.sampler.part(2 * hc.size(), left, 0, 1)
    assert set(trainer.train.asked_of_all()) == set(zip(epochs, indices))
    kept = sorted(path.name for path in (folder / "run" / "snapshots").iterdir())
    assert kept == [f"step-{step:08}" for step in range(1, outcome.steps + 1)]


def test_ranks_with_fewer_batches_keep_step_and_a_skipped_step_leaves_nothing(folder) -> None:
    """A last batch of three samples, three samples to evaluate on one by one, and a loss that is nan on one rank."""
    values = settings("gpt-tiny", write_text(folder, 16 * 14 + 1), epochs=1, steps=None)
    values.update(accumulate=4, validation_split=0.22, optimizer="sgd", on_nan="skip", eval_batches=None)
    # Without dropout, as stage 3 takes fewer micro-batches at the end.
    values["model_options"] = {**SMALL, "dropout": 0.0}
    one, other = (
        train(folder / f"run-{stage}", poisoned=2, **values, segments=3, shard=stage)
        for stage in ("none", "3,accumulate_locally=true")
    )
    assert (len(one[0].train), len(one[0].test)) == (11, 3)
    assert one[1].steps == other[1].steps == 2
    assert one[1].evaluation == pytest.approx(other[1].evaluation)
    torch.testing.assert_close(final_weights(one[1]), final_weights(other[1]))
