"""Training runs as the command makes them: every model, recomputed or not; going on from a snapshot; data, logs, errors."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import numpy
import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.data.sampler import Sampler
from hvd_ckpt.snapshots import reader
from hvd_ckpt.training.build import assemble
from hvd_ckpt.training.collective import errors_everywhere
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.logs import read
from hvd_ckpt.training.trainer import Trainer

pytestmark = [pytest.mark.ranks(gloo=(1, 2, 4)), pytest.mark.usefixtures("quick_planner")]

everywhere = pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2,))
twice = pytest.mark.ranks(gloo=(2,))  # as much as anywhere

SMALL = {"width": 32, "layers": 3, "heads": 2}
MODELS = {
    "bert-tiny": SMALL,
    "roberta-tiny": SMALL,
    "xlnet-tiny": SMALL,
    "gpt2-tiny": SMALL,
    "gpt-tiny": {**SMALL, "dropout": 0.1},
    "lstm-medium": {"width": 24},
    "densenet-22": {},
    "resnet-20": {},
    "vnet": {"width": 2},
}


@pytest.fixture(scope="module")
def text():
    path = hc.broadcast_object(tempfile.mkdtemp(prefix="hvd_ckpt_text_") if hc.rank() == 0 else "", 0)
    file = Path(path) / "text.txt"
    if hc.rank() == 0:
        file.write_bytes(bytes(range(32, 127)) * 60)
    hc.barrier()
    yield str(file)
    hc.barrier()
    if hc.rank() == 0:
        shutil.rmtree(path)


def settings(name, text, **changes):
    values = {
        "model": name,
        "model_options": MODELS[name],
        "steps": 3,
        "batch": 4,
        "lr": 1e-2,
        "eval_batches": 1,
    }
    if name in ("densenet-22", "resnet-20"):
        values.update(pixels=8)
    elif name == "vnet":
        values.update(pixels=16, batch=4)
    else:
        values.update(text=text, length=16)
    return {**values, **changes}


def train(folder, **values):
    config = Config(**values) if "resume" in values else Config(**values, output=str(folder))
    parts = assemble(config)
    trainer = Trainer(config, parts.model, parts.objective, parts.train, parts.test)
    outcome = trainer.run()
    hc.barrier()  # rank 0 draws the loss and removes old snapshots at the end
    return trainer, outcome


def final_weights(outcome):
    found = reader.newest(outcome.folder / "snapshots")
    assert found is not None and found.name == f"step-{outcome.steps:08}"
    return reader.read(found).weights


def assert_same(weights, others):
    assert list(weights) == list(others)
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def assert_each_bucket_once(*trainers):
    for trainer in trainers:
        stats = trainer.optimizer.reduction_stats
        assert set(stats.launches.values()) == {3} and stats.late_gradients == 0


@twice
@pytest.mark.parametrize("name", MODELS)
def test_a_recomputed_run_ends_in_the_bits_of_one_that_keeps_everything(name, text, folder):
    kept, outcome = train(folder / "kept", **settings(name, text, accumulate=2))
    weights = final_weights(outcome)
    segments, recomputed = train(folder / "segments", **settings(name, text, accumulate=2, segments=3))
    assert_same(weights, final_weights(recomputed))
    assert outcome.evaluation == recomputed.evaluation
    assert_each_bucket_once(kept, segments)


@twice
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny"])
def test_a_run_within_a_budget_ends_in_the_bits_of_one_that_keeps_everything(name, text, folder):
    weights = final_weights(train(folder / "kept", **settings(name, text, accumulate=2))[1])
    planned, within = train(folder / "plan", **settings(name, text, accumulate=2, budget="min"))
    assert planned.plan is not None and any(
        block.policy.selective is not None for block in planned.plan.blocks
    )
    assert_same(weights, final_weights(within))
    assert_each_bucket_once(planned)
    file = str(folder / "plan" / "plan.json")
    loaded, again = train(folder / "again", **settings(name, text, accumulate=2, plan=file))
    assert loaded.plan == planned.plan
    assert_same(weights, final_weights(again))


@twice
def test_reentrant_segments_train_alike_to_rounding(text, folder):
    values = settings("gpt-tiny", text, accumulate=2)
    weights = final_weights(train(folder / "kept", **values)[1])
    others = final_weights(train(folder / "segments", **values, segments=3, reentrant=True)[1])
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("fp32", marks=everywhere),
        pytest.param("fp16", marks=twice),
        pytest.param("bf16", marks=twice),
    ],
)
def test_a_run_that_goes_on_ends_in_the_bits_of_one_never_stopped(precision, text, folder):
    values = settings(
        "gpt-tiny",
        text,
        steps=4,
        precision=precision,
        schedule="cosine",
        warmup=2,
        clip=0.5,
        eval_every=2,
        snapshot_every=2,
        keep_snapshots=5,
        log_every=1,
    )
    whole = final_weights(train(folder / "whole", **values)[1])
    if hc.rank() == 0:
        shutil.copytree(folder / "whole", folder / "stopped")
        shutil.rmtree(folder / "stopped" / "snapshots" / "step-00000004")
    hc.barrier()
    _, outcome = train(folder, **values, resume=str(folder / "stopped"))
    assert outcome.folder == folder / "stopped"
    assert_same(whole, final_weights(outcome))
    ends = [
        reader.read(folder / run / "snapshots" / "step-00000004", hc.rank()) for run in ("whole", "stopped")
    ]
    assert torch.equal(ends[0].per_rank["random"]["torch"], ends[1].per_rank["random"]["torch"])
    assert ends[0].replicated["progress"] == ends[1].replicated["progress"]
    first, second = (
        [(one["step"], one["kind"], one["loss"]) for one in read(folder / run / "log.jsonl")]
        for run in ("whole", "stopped")
    )
    assert first == second


@twice
def test_running_statistics_of_each_rank_go_on_too(text, folder):
    values = settings("densenet-22", text, steps=2, snapshot_every=1, keep_snapshots=5, batch_norm="deferred")
    trainer, _ = train(folder / "whole", **values)
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    resumed = str(folder / "whole" / "snapshots" / "step-00000001")
    again, outcome = train(folder, **values, resume=resumed)
    assert outcome.folder == folder / "whole"
    assert_same(buffers, dict(again.model.named_buffers()))
    means = hc.allgather_object(buffers["classifier.0.running_mean"])
    assert not torch.equal(means[0], means[1])


@pytest.mark.parametrize("batch_norm", ["deferred-ranks", pytest.param("synchronized", marks=twice)])
def test_batch_norms_over_all_ranks_agree_on_their_statistics(batch_norm, text, folder):
    values = settings("resnet-20", text, steps=2, accumulate=2, batch_norm=batch_norm)
    trainer, _ = train(folder / "run", **values)
    means = hc.allgather_object(dict(trainer.model.named_buffers()))
    for other in means[1:]:
        assert_same(means[0], other)


class Recording:
    """A data set that remembers what it was asked for."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def batch(self, indices, epoch):
        self.asked.append(list(zip(epoch, indices)))
        return self.data.batch(indices, epoch)


def test_each_sample_is_trained_on_once_by_one_rank_and_short_last_batches_count_right(text, folder):
    """Three epochs, and three samples at most in the last global batch: two ranks share them unevenly, one of four has none."""
    count = 2 * hc.size() + 1
    file = folder / "text.txt"
    if hc.rank() == 0:
        file.write_bytes(Path(text).read_bytes()[: 8 * count + 1])
    hc.barrier()
    values = settings("gpt-tiny", str(file), steps=None, epochs=3, batch=2, length=8, held_out=0)
    values.update(optimizer="sgd", weight_decay=0)
    values["model_options"] = {**SMALL, "dropout": 0.0}
    config = Config(**values, output=str(folder / "run"))
    parts = assemble(config)
    assert len(parts.train) == count and parts.test is None
    data = Recording(parts.train)
    trainer = Trainer(config, parts.model, parts.objective, data)
    outcome = trainer.run()
    if hc.rank() == 0:
        assert data.asked.pop(0) == [(0, 0)]  # a look at one sample, to say what a step is
    assert 3 * count % (2 * hc.size()) == min(3, 2 * hc.size() - 1)
    assert outcome.steps == -(-3 * count // (2 * hc.size())) and outcome.evaluation == {}

    # One process that has every global batch to itself takes the same steps, to rounding.
    alone = assemble(config)
    optimizer = torch.optim.SGD(alone.model.parameters(), lr=config.lr)
    order = Sampler(count, config.seed, 3)
    drawn = []
    for step in range(outcome.steps):
        indices, epochs = order.part(2 * hc.size() * step, 2 * hc.size(), 0, 1)
        drawn += zip(epochs, indices)
        batch = alone.train.batch(indices, epochs)
        trainer.schedule.apply(optimizer, step)
        optimizer.zero_grad()
        alone.objective.loss(alone.model(*batch.inputs), batch).backward()
        optimizer.step()
    seen = [one for rank in hc.allgather_object(data.asked) for batch in rank for one in batch]
    assert sorted(drawn) == sorted((epoch, index) for epoch in range(3) for index in range(count))
    assert set(seen) == set(drawn)
    assert len(seen) - len(drawn) < hc.size()  # a rank without a sample runs with one that counts nothing
    for ours, theirs in zip(trainer.model.parameters(), alone.model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_training_ends_early_on_every_rank_when_evaluations_get_no_better(text, folder):
    values = settings("gpt-tiny", text, steps=50, lr=1e-30, eval_every=1, patience=2)
    _, outcome = train(folder / "run", **values)
    assert outcome.ended_early and outcome.steps == 3
    assert hc.allgather_object(outcome.evaluation) == [outcome.evaluation] * hc.size()
    final_weights(outcome)


@twice
def test_a_run_leaves_logs_a_plot_its_settings_and_the_newest_snapshots(text, folder):
    values = settings("gpt-tiny", text, steps=4, log_every=2, eval_every=3, snapshot_every=1, clip=1.0)
    _, outcome = train(folder / "run", **values)
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {"config.yaml", "log.jsonl", "loss.png", "snapshots"}
    assert sorted(path.name for path in (outcome.folder / "snapshots").iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    records = read(outcome.folder / "log.jsonl")
    assert [(one["kind"], one["step"]) for one in records] == [
        ("train", 1),  # at once, whatever log_every says
        ("train", 2),
        ("eval", 3),
        ("train", 4),
        ("eval", 4),
    ]
    assert records[0]["unit"] == "tokens" and records[0]["rate"] > 0 and records[0]["memory"] > 1 << 20
    evaluated = records[2]
    assert evaluated["loss"] > 0 and 0 <= evaluated["accuracy"] <= 1
    assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))
    assert evaluated["samples"] == outcome.evaluation["samples"] > 0


NO_TEXT = {"text": None, "length": None, "model_options": {}}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model": "brt-tiny"}, "no model 'brt-tiny': did you mean 'bert-tiny'?"),
        ({"model": "unheard-of-thing"}, "no model 'unheard-of-thing': choose one of"),
        ({"model_options": {"layer": 2}}, "no option of gpt-tiny 'layer': did you mean 'layers'?"),
        ({"model_options": {"layers": 0}}, "model gpt-tiny: layers must be at least 1, got 0"),
        ({"model_options": {"layers": "two"}}, "model gpt-tiny: "),
        ({"text": "/no/such/file"}, "/no/such/file"),
        ({"images": "folder"}, "images folder: the model gpt-tiny is trained on text, leave it out"),
        ({"optimizer": "adamv"}, "did you mean 'adam"),
        ({"optimizer_options": {"bta": 1}}, "bta"),
        ({"batch_norm": "deferred"}, "batch_norm deferred: this Chain has no batch norm"),
        ({"segments": 100}, "segments 100: this model has"),
        ({"plan": "/no/plan.json"}, "plan: cannot read '/no/plan.json'"),
        ({"budget": "1KiB"}, "budget 1KiB: No plan stays within"),
        ({"precision": "apex-O1"}, "precision 'apex-O1' cannot be used"),
        ({"device": "tpu"}, "device 'tpu'"),
        (
            {**NO_TEXT, "model": "densenet-121", "pixels": 8},
            "the model densenet-121 cannot take micro-batches of shape",
        ),
        (
            {**NO_TEXT, "model": "vnet", "pixels": 20},
            "the model vnet cannot take micro-batches of shape (4, 1, 20,",
        ),
        ({**NO_TEXT, "model": "vnet", "pixels": 16, "batch": 1}, "Expected more than 1 value per channel"),
        ({"warmup": 9}, "warmup 9"),
    ],
)
@twice
def test_what_cannot_be_is_an_error_on_every_rank(changes, said, text, folder):
    with pytest.raises(ConfigError) as caught:
        train(folder / "run", **{**settings("gpt-tiny", text), **changes})
    message = str(caught.value)
    assert said in message and "\n" not in message
    assert hc.allgather_object(message) == [message] * hc.size()


@pytest.mark.skipif(hc.size() == 1, reason="needs a rank that has none")
def test_what_only_one_rank_lacks_is_an_error_on_all():
    def lack_text():
        with errors_everywhere("test.errors"):
            if hc.rank() == hc.size() - 1:
                raise ConfigError("no text here")

    with pytest.raises(ValueError, match="no text here"):
        lack_text()


@twice
def test_a_folder_in_use_and_a_foreign_snapshot_are_errors(text, folder):
    values = settings("gpt-tiny", text, steps=1)
    train(folder / "run", **values)
    with pytest.raises(ConfigError, match="is not empty: give a new one"):
        train(folder / "run", **values)
    with pytest.raises(ValueError, match="there is no snapshot in"):
        train(folder, **values, resume=str(folder))
    other = {**values, "model_options": {**SMALL, "layers": 2}}
    with pytest.raises(ConfigError, match="the snapshot is of another model"):
        train(folder, **other, resume=str(folder / "run"))


def values_of(name, text, **changes):
    """Settings in which all that a run carries along matters: dropout, micro-batches, a decay, evaluations between snapshots."""
    changes = {"accumulate": 2, "schedule": "cosine", "clip": 0.5, "keep_snapshots": 9, **changes}
    return settings(name, text, **changes)


@twice
def test_a_plan_and_an_open_log_entry_go_on(text, folder):
    values = values_of("gpt-tiny", text, steps=4, budget="min", log_every=4, snapshot_every=2)
    first, whole = train(folder / "run", **values)
    weights, log = final_weights(whole), read(whole.folder / "log.jsonl")
    again, outcome = train(folder, **values, resume=str(folder / "run" / "snapshots" / "step-00000002"))
    assert again.plan == first.plan
    assert_same(weights, final_weights(outcome))
    assert [one["loss"] for one in read(outcome.folder / "log.jsonl")] == [one["loss"] for one in log]
    other, _ = train(
        folder,
        **{**values, "budget": "0.9x", "lr": 0.5, "weight_decay": 0.25, "steps": 5},
        resume=str(folder / "run"),
    )
    assert other.plan is not None and other.plan.budget != first.plan.budget
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=twice)])
def test_epochs_go_on_with_another_global_batch_to_the_end_of_the_stream(batch, text, folder):
    """As they do with another number of ranks: the rest of the samples is trained on, each once."""
    file = folder / "text.txt"
    count = 8 * hc.size() + 1
    if hc.rank() == 0:
        file.write_bytes(Path(text).read_bytes()[: 8 * count + 1])
    hc.barrier()
    values = values_of(
        "gpt-tiny", str(file), steps=None, epochs=1, batch=2, length=8, held_out=0, snapshot_every=1
    )
    train(folder / "run", **values)
    changed = {**values, "batch": batch, "accumulate": 1}
    resumed = str(folder / "run" / "snapshots" / "step-00000001")
    config = Config(**changed, resume=resumed)
    parts = assemble(config)
    data = Recording(parts.train)
    trainer = Trainer(config, parts.model, parts.objective, data)
    data.asked.clear()  # the summary of the run has looked at a sample
    outcome = trainer.run()
    hc.barrier()
    left = count - 2 * hc.size()
    assert outcome.steps == 1 + -(-left // (batch * hc.size()))
    assert trainer.progress.position == count
    seen = {one for rank in hc.allgather_object(data.asked) for part in rank for one in part}
    indices, epochs = trainer.sampler.part(2 * hc.size(), left, 0, 1)
    assert seen == set(zip(epochs, indices))
    kept = sorted(path.name for path in (folder / "run" / "snapshots").iterdir())
    assert kept == [f"step-{step:08}" for step in range(1, outcome.steps + 1)]


@twice
def test_a_run_goes_on_from_an_older_snapshot_and_leaves_the_later_ones_behind(text, folder):
    values = settings("gpt-tiny", text, steps=6, snapshot_every=1, keep_snapshots=2)
    train(folder / "run", **values)
    _, outcome = train(
        folder,
        **{**values, "steps": 6, "snapshot_every": 3, "patience": 1, "eval_every": 1, "lr": 1e-30},
        resume=str(folder / "run" / "snapshots" / "step-00000005"),
    )
    assert outcome.steps == 6
    for name, changed, said in (
        ("seed", 5, "seed 5: the run that is to resume has 0"),
        ("optimizer", "sgd", "optimizer sgd: the run that is to resume has adamw"),
        ("length", 8, "samples to train on and there are"),
    ):
        with pytest.raises(ConfigError) as caught:
            train(folder, **{**values, name: changed}, resume=str(folder / "run"))
        assert said in str(caught.value)


@twice
def test_synchronized_batch_norms_meet_in_a_short_last_batch_of_micro_batches(text, folder):
    count = 4 * hc.size() + 3  # two samples on one rank, one on the other
    arrays = folder / "images.npz"
    if hc.rank() == 0:
        numpy.savez(
            arrays,
            images=numpy.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(numpy.uint8),
            labels=numpy.arange(count) % 3,
        )
    hc.barrier()
    values = settings("resnet-20", text, images=str(arrays), steps=None, epochs=1, held_out=0, seed=2**62)
    for kind in ("synchronized", "deferred-ranks"):
        trainer, outcome = train(folder / kind, **values, accumulate=4, batch_norm=kind)
        assert outcome.steps == 2 and trainer.progress.position == count
        statistics = hc.allgather_object(trainer.model[0][1].running_mean)
        assert torch.equal(statistics[0], statistics[1])


@twice
def test_planning_leaves_no_trace_in_deferred_batch_norms(text, folder):
    values = settings("resnet-20", text, accumulate=2, batch_norm="deferred", steps=2)
    weights = final_weights(train(folder / "kept", **values)[1])
    assert_same(weights, final_weights(train(folder / "plan", **values, budget="0.7x")[1]))
