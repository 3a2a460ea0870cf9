"""Training runs as the command makes them: recomputed, planned, resumed; data, logs and errors."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy
import pytest
import runs
import torch
from runs import final_weights
from same import assert_same
from snapshot_files import read_snapshot
from torch.utils.data import Subset

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.ending import errors_everywhere
from hvd_ckpt.app.training.logs import read
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.utils.spans import KINDS

pytestmark = [pytest.mark.ranks(gloo=(2,)), pytest.mark.usefixtures("quick_planner")]

SMALL = {"width": 32, "layers": 3, "heads": 2}
MODELS = {
    "bert-tiny": SMALL,
    "xlnet-tiny": SMALL,
    "gpt-tiny": {**SMALL, "dropout": 0.1},
    "lstm-medium": {"width": 24},
    "resnet-20": {},
    "vnet": {"width": 2},
}
STEP_2, STEP_4 = "snapshots/step-00000002", "snapshots/step-00000004"


@pytest.fixture(scope="module")
def text(module_folder):
    file = module_folder / "text.txt"
    if hc.rank() == 0:
        file.write_bytes(bytes(range(32, 127)) * 60)
    hc.barrier()
    return str(file)


def beginning(text, folder, count):
    """A file with so many bytes of the text."""
    if hc.rank() == 0:
        (folder / "text.txt").write_bytes(Path(text).read_bytes()[:count])
    hc.barrier()
    return str(folder / "text.txt")


def settings(name, text, **changes):
    values = {"model": name, "model_options": MODELS[name], "steps": 3, "batch": 4, "lr": 1e-2}
    values["eval_batches"] = 1
    if name in ("resnet-20", "vnet"):
        values["pixels"] = 8 if name == "resnet-20" else 16
    else:
        values.update(data=f"text:{text}", sequence_length=16)
    return {**values, **changes}


def train(folder, recording=False, **values):
    trainer = runs.trainer_of(folder, values, data=lambda data: Recording(data) if recording else data)
    if recording:
        trainer.train.asked.clear()  # the summary of the run has looked at a sample
    return trainer, runs.run(trainer)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_and_planned_runs_end_in_the_bits_of_one_that_keeps_everything(name, text, folder):
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
        for run, given in (("again", {**values, "plan": file}), ("found", {**cached, "seed": 7})):
            loaded, again = train(folder / run, **given)
            assert loaded.plan == planned.plan
            if run == "again":
                assert_same(weights, final_weights(again))
        reentrant = final_weights(train(folder / "reentrant", **values, segments="3,reentrant=true")[1])
        for one, weight in weights.items():
            torch.testing.assert_close(weight, reentrant[one], rtol=1e-3, atol=1e-5)
    for trainer in trainers:
        stats = trainer.optimizer.reduction_stats
        assert set(stats.launches.values()) == {3} and stats.late_gradients == 0


@pytest.mark.ranks(gloo=(1, 2), mpi=(2,))
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.ranks(gloo=(2,)))])
def test_a_run_that_is_resumed_ends_in_the_bits_of_one_never_stopped(precision, text, folder):
    """In half precision with a plan, too, which the snapshot holds; and then with changed settings."""
    values = settings("gpt-tiny", text, steps=4, precision=precision, schedule="cosine", warmup=2, clip=0.5)
    values.update(eval_every=2, snapshot_every=2, keep_snapshots=5, log_every=1, accumulate=2)
    if precision == "fp16":
        values.update(budget="min", log_every=4)  # a log entry is open at the snapshot
    first, outcome = train(folder / "whole", **values)
    whole = final_weights(outcome)
    if hc.rank() == 0:
        shutil.copytree(folder / "whole", folder / "stopped")
        shutil.rmtree(folder / "stopped" / STEP_4)
    hc.barrier()
    again, outcome = train(folder, **values, resume=str(folder / "stopped"))
    assert outcome.folder == folder / "stopped" and again.plan == first.plan
    assert_same(whole, final_weights(outcome))
    ends = [read_snapshot(folder / run / STEP_4, hc.rank()) for run in ("whole", "stopped")]
    assert torch.equal(ends[0].per_rank["random"]["torch"], ends[1].per_rank["random"]["torch"])
    assert ends[0].replicated["progress"] == ends[1].replicated["progress"]
    one, other = (
        [(record["step"], record["kind"], record["loss"]) for record in read(folder / run / "log.jsonl")]
        for run in ("whole", "stopped")
    )
    assert one == other
    if precision == "fp16":
        changes = {"budget": "0.9x", "lr": 0.5, "weight_decay": 0.25, "steps": 5}
        other, _ = train(folder, **{**values, **changes}, resume=str(folder / "stopped"))
        assert other.plan is not None and other.plan.budget != first.plan.budget
        assert other.optimizer.param_groups[0]["weight_decay"] == 0.25


def test_batch_norms_over_all_ranks_agree_also_in_a_short_last_batch(text, folder):
    count = 4 * hc.size() + 3  # two samples on one rank, one on the other
    arrays = folder / "images.npz"
    if hc.rank() == 0:
        images = numpy.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(numpy.uint8)
        numpy.savez(arrays, images=images, labels=numpy.arange(count) % 3)
    hc.barrier()
    values = settings(
        "resnet-20", text, data=f"images:{arrays}", steps=None, epochs=1, validation_split=0, seed=2**62
    )
    for kind in ("synchronized", "deferred-ranks"):
        trainer, outcome = train(folder / kind, **values, accumulate=4, batch_norm=kind)
        assert outcome.steps == 2 and trainer.progress.position == count
        first, *others = hc.allgather_object(dict(trainer.model.named_buffers()))
        for other in others:
            assert_same(first, other)


class Recording:
    """A data set that remembers what it was asked for."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def batch(self, indices, epoch):
        self.asked.append(list(zip(epoch, indices)))
        return self.data.batch(indices, epoch)

    def asked_of_all(self):
        return [one for rank in hc.allgather_object(self.asked) for batch in rank for one in batch]


@pytest.mark.ranks(gloo=(2, 4))
def test_each_sample_is_trained_on_once_by_one_rank_and_short_last_batches_count_right(text, folder):
    """Three epochs, and three samples in the last global batch: two ranks share them unevenly, one of four has none."""
    count = 2 * hc.size() + 1
    values = settings(
        "gpt-tiny", beginning(text, folder, 8 * count + 1), epochs=3, batch=2, sequence_length=8
    )
    values.update(optimizer="sgd", weight_decay=0, steps=None, validation_split=0)
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
    for ours, theirs in zip(trainer.model.parameters(), alone.model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_resumed_epoch_with_another_global_batch_ends_at_the_end_of_the_stream(text, folder):
    """As with another number of ranks: the rest of the samples is trained on, each once."""
    count = 8 * hc.size() + 1
    values = settings(
        "gpt-tiny", beginning(text, folder, 8 * count + 1), epochs=1, batch=2, sequence_length=8
    )
    values.update(steps=None, validation_split=0, snapshot_every=1, keep_snapshots=99)
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


def test_training_ends_early_on_every_rank_when_evaluations_get_no_better(text, folder):
    values = settings("gpt-tiny", text, steps=50, lr=1e-30, eval_every=1, patience=2)
    _, outcome = train(folder / "run", **values)
    assert outcome.ended_early and outcome.steps == 3
    assert hc.allgather_object(outcome.evaluation) == [outcome.evaluation] * hc.size()
    final_weights(outcome)


def test_a_run_leaves_logs_its_settings_and_the_newest_snapshots(text, folder):
    values = settings("gpt-tiny", text, steps=4, log_every=2, eval_every=3, snapshot_every=1)
    _, outcome = train(folder / "run", **values)
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {"config.yaml", "log.jsonl", "snapshots"}
    kept = sorted(path.name for path in (outcome.folder / "snapshots").iterdir())
    assert kept == ["step-00000003", "step-00000004"]
    records = read(outcome.folder / "log.jsonl")
    kinds = [(one["kind"], one["step"]) for one in records]  # step 1 at once, whatever log_every says
    assert kinds == [("train", 1), ("train", 2), ("eval", 3), ("train", 4), ("eval", 4)]
    assert records[0]["unit"] == "tokens" and records[0]["rate"] > 0 and records[0]["memory"] > 1 << 20
    evaluated = records[2]
    assert evaluated["loss"] > 0 and 0 <= evaluated["accuracy"] <= 1
    assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))
    assert evaluated["samples"] == outcome.evaluation["samples"] > 0
    # Resumed from an older snapshot, a run leaves the later ones behind.
    changes = {"steps": 4, "patience": 1, "eval_every": 1, "snapshot_every": 9}
    _, again = train(folder, **{**values, **changes}, resume=str(folder / "run/snapshots/step-00000003"))
    assert again.steps == 4
    for name, changed, said in (
        ("seed", 5, "seed 5: the run that is to resume has 0"),
        ("sequence_length", 8, "samples to train on and there are"),
        ("model_options", {**SMALL, "layers": 2}, "the snapshot is of another model"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(folder, **{**values, name: changed}, resume=str(folder / "run"))
    with pytest.raises(ConfigError, match="is not empty: give a new one"):
        train(folder / "run", **values)
    with pytest.raises(ValueError, match="there is no snapshot in"):
        train(folder, **values, resume=str(folder))


def test_frozen_layers_stay_and_blocks_have_rates_of_their_own_sharded_and_resumed(text, folder):
    values = settings(
        "gpt-tiny", text, steps=4, freeze="embedding.*,*.bias", layer_decay=0.5, ema=0.5, snapshot_every=2
    )
    values.update(eval_every=2, keep_snapshots=9, segments=2, model_options={**SMALL, "tied": False})
    start = {name: one.clone() for name, one in assemble(Config(**values)).model.state_dict().items()}
    trainer, outcome = train(folder / "whole", **values)
    weights = final_weights(outcome)
    for name, weight in weights.items():
        frozen = name.startswith("embedding.") or name.endswith(".bias")
        assert torch.equal(weight, start[name]) == frozen, name
    blocks = len(trainer.model)
    rates = {group["lr"] / trainer.schedule.rate(3) for group in trainer.optimizer.param_groups}
    assert rates == {0.5 ** (blocks - 1 - block) for block in range(1, blocks)}
    assert outcome.evaluation["ema_loss"] != outcome.evaluation["loss"]
    _, sharded = train(folder / "sharded", **values, shard=3)
    assert sharded.evaluation == outcome.evaluation
    _, again = train(folder, **values, shard=3, resume=str(folder / "whole" / STEP_2))
    assert again.evaluation == outcome.evaluation
    for changed in ({"freeze": "embedding.*"}, {"layer_decay": None}):
        with pytest.raises(ConfigError, match=f"{next(iter(changed))} .*: the run that is to resume has"):
            train(folder, **{**values, **changed}, resume=str(folder / "whole"))


def test_the_log_says_where_the_time_goes_and_traces_name_segments_and_buckets(text, folder):
    values = settings("gpt-tiny", text, log_every=1, segments=2, accumulate=2, profile="2:3")
    train(folder / "run", **values)
    for record in read(folder / "run" / "log.jsonl")[:3]:
        parts = {kind: record[f"{kind}_seconds"] for kind in KINDS}
        assert all(seconds > 0 for seconds in parts.values()), parts
        assert sum(parts.values()) < record["step_seconds"] * (1 + 1e-9)
    trace = json.loads((folder / "run" / "profile" / f"rank-{hc.rank():05}.json").read_text())["traceEvents"]
    names = Counter(event["name"].split(" (")[0] for event in trace if "hvd_ckpt: " in event["name"])
    expected = {"data": 2, "forward": 4, "backward": 4, "recompute segment 1 of 2": 4, "update": 2}
    for name, times in expected.items():
        assert names[f"hvd_ckpt: {name}"] == times, names
    buckets = [name for name in names if name.startswith("hvd_ckpt: send bucket")]
    assert buckets and all(names[name] == 2 for name in buckets)
    assert sum(bool(re.search(r"wait for .*bucket", name)) for name in names) == len(buckets)


NO_TEXT = {"data": None, "sequence_length": None, "model_options": {}}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model": "brt-tiny"}, "no model 'brt-tiny': did you mean 'bert-tiny'?"),
        ({"model_options": {"layer": 2}}, "no option of gpt-tiny 'layer': did you mean 'layers'?"),
        ({"model_options": {"layers": 0}}, "model gpt-tiny: layers is 0"),
        ({"data": "text:/no/such/file"}, "/no/such/file"),
        ({"data": "images:folder"}, "data images:folder: the model gpt-tiny is trained on text, leave"),
        ({"optimizer": "adamv"}, "did you mean 'adam"),
        ({"batch_norm": "deferred"}, "batch_norm deferred: this Chain has no batch norm"),
        ({"segments": 100}, "segments 100: this model has"),
        ({"plan": "/no/plan.json"}, "plan: cannot read '/no/plan.json'"),
        ({"budget": "1KiB"}, "budget 1KiB: No plan stays within"),
        ({"budget": "min,cache=/dev/null/x"}, "the plan cache '/dev/null/x' cannot be written"),
        ({"precision": "apex-O1"}, "precision 'apex-O1' cannot be used"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({**NO_TEXT, "model": "vnet", "pixels": 20}, "the model vnet cannot take micro-batches of shape"),
        ({"warmup": 9}, "warmup 9"),
        ({"freeze": "embedding.*,embeding*"}, "freeze: no parameter fits 'embeding*'"),
        ({"freeze": "*"}, "no parameter that is trained"),
        ({"profile": "4:5"}, "profile 4:5: the run ends after step 3"),
    ],
)
def test_invalid_settings_are_an_error_on_every_rank(changes, said, text, folder):
    with pytest.raises(ConfigError) as caught:
        train(folder / "run", **{**settings("gpt-tiny", text), **changes})
    message = str(caught.value).removeprefix("rank 0: ")  # which alone reads a plan
    assert said in message and "\n" not in message
    assert hc.allgather_object(message) == [message] * hc.size()
    assert not list(folder.glob("run/*")), "the folder cannot be given again"


def test_an_empty_set_to_evaluate_on_is_an_error_before_the_first_step(text, folder):
    config = Config(**settings("gpt-tiny", text), output=str(folder / "run"))
    model, objective, train, _ = assemble(config)
    with pytest.raises(ConfigError, match="the data set to evaluate on has no samples"):
        Trainer(config, model, objective, train, Subset(train, []))


def test_a_plan_that_cannot_be_written_is_an_error_on_every_rank(text, folder, monkeypatch):
    def save(plan, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Plan, "save", save)
    with pytest.raises(ConfigError, match="No space left on device: .*plan.json"):
        runs.trainer_of(folder / "run", settings("gpt-tiny", text, budget="min"))


def test_error_of_one_rank_is_raised_on_all_ranks():
    def lack_text():
        with errors_everywhere("test.errors"):
            if hc.rank() == hc.size() - 1:
                raise ConfigError("no text here")

    with pytest.raises(ValueError, match="no text here"):
        lack_text()
