"""What runs leave and say: logs, traces, callbacks and errors."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import runs
import torch
from runs import SMALL, final_weights, settings, write_text
from torch.utils.data import Subset

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.logs import read
from hvd_ckpt.app.training.trainer import Outcome, Trainer
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.utils.spans import KINDS

pytestmark = [pytest.mark.ranks(gloo=(2,)), pytest.mark.usefixtures("quick_planner")]


@pytest.fixture(scope="module")
def text(module_folder: Path) -> Path:
    return write_text(module_folder)


def train(folder: Path, **values: Any) -> Outcome:
    return runs.run(runs.trainer_of(folder, values))


# ------------------------------------------------------------------------------------ logs and callbacks


def test_training_ends_early_on_every_rank_when_evaluations_get_no_better(text: Path, folder: Path) -> None:
    values = settings("gpt-tiny", text, steps=50, lr=1e-30, eval_every=1, patience=2)
    outcome = train(folder / "run", **values)
    assert outcome.ended_early and outcome.steps == 3
    assert hc.allgather_object(outcome.evaluation) == [outcome.evaluation] * hc.size()
    final_weights(outcome)


class Heard:
    """A callback that keeps what it is told, in a list for all of its kind."""

    heard: ClassVar[list[str]] = []

    def on_begin(self, trainer: Trainer) -> None:
        kernels = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        self.heard[:] = [f"begin {trainer.progress.step} {kernels}"]

    def on_log(self, record: dict[str, Any]) -> None:
        self.heard.append(f"log {record['step']}")
        assert record["loss"] > 0

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self.heard.append(f"evaluation {record['step']}")

    def on_snapshot(self, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.heard.append(f"snapshot {path.name[-1]}")

    def on_end(self, outcome: Outcome | None) -> None:
        self.heard.append(f"end {outcome and outcome.steps}")


def test_a_callback_is_told_of_all_that_happens_and_the_log_and_traces_say_where_the_time_goes(
    text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run with deterministic kernels."""
    Heard.heard.clear()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    values = settings("gpt-tiny", text, steps=4, log_every=1, snapshot_every=2, eval_every=2, profile="2:3")
    values.update(segments=2, accumulate=2, deterministic=True, callback=f"{__name__}:Heard")
    try:
        train(folder / "run", **values)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    told = [one for one in Heard.heard if not one.startswith("snapshot")]
    expected = ["begin 0 (True, False)", "log 1", "log 2", "evaluation 2", "log 3", "log 4", "evaluation 4"]
    assert told == ([*expected, "end 4"] if hc.rank() == 0 else [])  # the first process alone is told
    if told:
        assert Heard.heard[-2:] == ["snapshot 4", "end 4"] and Heard.heard.count("snapshot 2") == 1
        assert Heard.heard.index("snapshot 2") > Heard.heard.index("evaluation 2")

    for record in (one for one in read(folder / "run" / "log.jsonl") if one["kind"] == "train"):
        parts = {kind: record[f"{kind}_seconds"] for kind in KINDS}
        assert all(seconds > 0 for seconds in parts.values()), parts
        assert sum(parts.values()) < record["step_seconds"] * (1 + 1e-9)
    trace = json.loads((folder / "run" / "profile" / f"rank-{hc.rank():05}.json").read_text())["traceEvents"]
    names = Counter(event["name"].split(" (")[0] for event in trace if "hvd_ckpt: " in event["name"])
    spans = {"data": 2, "forward": 4, "backward": 4, "recompute segment 1 of 2": 4, "update": 2}
    for name, times in spans.items():
        assert names[f"hvd_ckpt: {name}"] == times, names
    buckets = [name for name in names if name.startswith("hvd_ckpt: send bucket")]
    assert buckets and all(names[name] == 2 for name in buckets)
    assert sum(bool(re.search(r"wait for .*bucket", name)) for name in names) == len(buckets)


class Failing(Heard):
    def on_evaluation(self, record: dict[str, Any]) -> None:
        raise KeyError("planted in a callback")


@pytest.mark.ranks(gloo=(1,))  # where other ranks would be ended: test_launch.py
def test_an_exception_of_a_callback_ends_the_run(text: Path, folder: Path) -> None:
    with pytest.raises(KeyError, match="planted in a callback"):
        train(folder / "run", **settings("gpt-tiny", text), callback=f"{__name__}:Failing")
    assert Heard.heard[-1] == "end None"


def test_a_run_leaves_logs_its_settings_and_the_newest_snapshots(text: Path, folder: Path) -> None:
    values = settings("gpt-tiny", text, steps=4, log_every=2, eval_every=3, snapshot_every=1)
    outcome = train(folder / "run", **values)
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
    again = train(folder, **{**values, **changes}, resume=str(folder / "run/snapshots/step-00000003"))
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


# ------------------------------------------------------------------------------------ errors


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
        (
            {"optimizer": "adafactor", "weight_decay": 0.0, "shard": 1},
            "shard optimizer: optimizer Adafactor does not",
        ),
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
def test_invalid_settings_are_an_error_on_every_rank(changes, said, text, folder) -> None:
    with pytest.raises(ConfigError) as caught:
        train(folder / "run", **{**settings("gpt-tiny", text), **changes})
    message = str(caught.value).removeprefix("rank 0: ")  # which alone reads a plan
    assert said in message and "\n" not in message
    assert hc.allgather_object(message) == [message] * hc.size()
    assert not list(folder.glob("run/*")), "the folder cannot be given again"


def test_no_samples_to_evaluate_on_and_a_plan_that_cannot_be_written_are_errors_on_every_rank(
    text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings("gpt-tiny", text, budget="min", output=str(folder / "run"))
    config = Config(**values)
    model, objective, data, _ = assemble(config)
    with pytest.raises(ConfigError, match="the data set to evaluate on has no samples"):
        Trainer(config, model, objective, data, Subset(data, []))

    def save(plan: Plan, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Plan, "save", save)
    with pytest.raises(ConfigError, match="No space left on device: .*plan.json"):
        runs.trainer_of(folder, values)
