"""The small parts of the training room: optimizers, schedules, logs, callbacks and progress."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import sys
import time
import types

import pytest
import torch
from same import same
from snapshot_files import file_size_limit
from torch import nn

from hvd_ckpt.app.training import logs
from hvd_ckpt.app.training.callbacks import Callbacks, callbacks_of
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.optim import Schedule, optimizer_names, optimizer_of
from hvd_ckpt.app.training.report import Meter, ProgressLines


def tied():
    """An embedding, a norm, a frozen layer, and a head with the embedding's weight."""
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), frozen, nn.Linear(4, 5))
    model[3].weight = model[0].weight
    return model


# ------------------------------------------------------------------------------------ optimizers


def build_optimizer(name, model, lr, weight_decay=0.0, options=None):
    given = {"optimizer": name, "lr": lr, "weight_decay": weight_decay, "optimizer_options": options or {}}
    return optimizer_of(Config("gpt-tiny", **given), model)


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_trains(name):
    model = tied()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = build_optimizer(name, model, 0.01)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    assert type(optimizer).__name__.lower() == name
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == key.startswith("2."), key


def test_weight_decay_is_for_matrices_alone():
    model = tied()
    decayed, others = build_optimizer("AdamW", model, 0.1, 0.02, {"betas": [0.9, 0.95]}).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(one)] for one in decayed["params"]] == ["0.weight"]
    assert [names[id(one)] for one in others["params"]] == ["1.weight", "1.bias", "3.bias"]
    assert (decayed["weight_decay"], others["weight_decay"], decayed["lr"]) == (0.02, 0.0, 0.1)
    assert decayed["betas"] == (0.9, 0.95)
    assert build_optimizer("rprop", model, 0.1, options={"etas": [0.4, 1.3]}).defaults["etas"] == (0.4, 1.3)
    first, second = (build_optimizer("adamw", tied(), 0.1, decay) for decay in (0.0, 0.1))
    assert [group["weight_decay"] for group in first.param_groups] == [0.0, 0.0]
    second.load_state_dict(first.state_dict())
    assert [len(group["params"]) for group in second.param_groups] == [1, 3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("adanw", 0.1), "did you mean 'adamw'?"),
        (("optimizer", 0.1), "no optimizer 'optimizer'"),
        (("rprop", 0.1, 0.1), "'rprop' has no weight decay"),
        (("sgd", 0.1, 0.0, {"momentun": 0.9}), "momentun"),
        (("sgd", 0.1, 0.0, {"lr": 1}), "lr"),
        (("adamw", 0.1, 0.0, {"betas": [0.9]}), "adamw"),
        (("adamw", 0.1, 0.0, {"betas": [0.9, 1.5]}), "beta"),
    ],
)
def test_invalid_optimizers_are_one_line(arguments, message):
    name, *rest = arguments
    with pytest.raises(ValueError, match=message) as error:
        build_optimizer(name, tied(), *rest)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no parameter that is trained"):
        build_optimizer("sgd", nn.Linear(2, 2).requires_grad_(False), 0.1)


# ------------------------------------------------------------------------------------ schedules


def test_rates_by_hand():
    def rates(name, warmup=0, steps=8):
        schedule = Schedule(name, 2.0, steps, warmup)
        return [schedule.rate(step) for step in range(steps + 2)]

    assert rates("constant", 2) == [1, *[2] * 9]
    assert rates("linear") == pytest.approx([2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates("linear", 4) == pytest.approx([0.5, 1, 1.5, 2, 2, 1.5, 1, 0.5, 0, 0])
    cosine = [1 + math.cos(math.pi * step / 8) for step in range(9)]
    assert rates("cosine") == pytest.approx([*cosine, 0])
    assert rates("inverse-sqrt", 4)[3:8] == pytest.approx([2, *(2 * math.sqrt(4 / n) for n in (5, 6, 7, 8))])
    assert rates("step") == pytest.approx([2] * 4 + [0.2] * 2 + [0.02] * 4)


def test_schedules_set_every_group_and_name_invalid_values():
    optimizer = build_optimizer("sgd", tied(), 1.0)
    first, second = optimizer.param_groups
    held = second["lr"] = torch.tensor(1.0)
    schedule = Schedule("linear", 1.0, 4)
    schedule.apply(optimizer, 2)
    assert first["lr"] == 0.5 and second["lr"] is held and held == 0.5
    first["lr_scale"] = 0.5
    schedule.apply(optimizer, 2)
    assert first["lr"] == 0.25
    for arguments, message in ((("cosin", 1.0, 10), "'cosin'"), (("linear", 1.0, 10, 11), "warmup 11")):
        with pytest.raises(ValueError, match=message):
            Schedule(*arguments)


# ------------------------------------------------------------------------------------ logs


def steps_of(log):
    return [record["step"] for record in logs.read(log.path)]


def test_records_are_valid_json_and_come_back(tmp_path):
    records = [
        {"step": 1, "kind": "train", "loss": math.inf, "lr": -math.inf, "unit": "tokens"},
        {"step": 2, "kind": "eval", "loss": 0.5, "best": True, "more": None},
        {"step": 3, "loss": math.nan},
    ]

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    with logs.Logs(tmp_path / "new") as log:
        for number, record in enumerate(records, start=1):
            log.write(record)
            assert len(log.path.read_bytes().splitlines()) == number, "in the file as soon as it is written"
        for line in log.path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
        assert same(logs.read(log.path), records)


def test_resume_writes_later_steps_anew_and_cuts_an_unfinished_line(tmp_path):
    with logs.Logs(tmp_path) as log:
        for step in (10, 20, 30):
            log.write({"step": step, "loss": float(step)})
            log.write({"step": step, "kind": "eval"})
    with log.path.open("a") as file:
        file.write('{"step": 40, "lo')
    begun = [10, 10, 20, 20]
    for start, steps in ((30, [30, 30, 35]), (20, [25]), (100, [25, 105])):
        with logs.Logs(tmp_path, step=start) as log:
            log.write({"step": start + 5})
        assert steps_of(log) == [*begun, *steps]


@pytest.mark.parametrize("line", ["no json", '{"step": "many"}'])
def test_bad_log_names_file_and_line(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    for use, name, said in (
        (logs.read, "log.jsonl", r"log\.jsonl', line 2"),
        (logs.Logs, "", r"log\.jsonl', line 2"),
        (logs.read, "absent", "absent"),
    ):
        with pytest.raises(ValueError, match=said):
            use(tmp_path / name)


def test_a_log_on_a_full_disk_holds_whole_records_only(tmp_path):
    with logs.Logs(tmp_path) as log:
        log.write({"step": 1, "loss": 0.5})
        with file_size_limit(log.path.stat().st_size + 10), pytest.raises(OSError, match="full|large"):
            log.write({"step": 2, "loss": 0.25})
        log.write({"step": 3, "loss": 0.125})
    assert steps_of(log) == [1, 3]


# ------------------------------------------------------------------------------------ callbacks


def test_tensorboard_hides_what_a_resume_writes_anew_and_fails_with_a_warning(tmp_path, monkeypatch):
    said, heard = [], []
    own = types.SimpleNamespace(on_log=lambda record: heard.append(record["step"]))

    def write(step, records, **run):
        tell = Callbacks([*callbacks_of(Config("gpt-tiny", tensorboard=True)), own], said.append)
        tell("on_begin", types.SimpleNamespace(progress=types.SimpleNamespace(step=step), **run))
        for record in records:
            tell("on_log" if record["kind"] == "train" else "on_evaluation", record)
        tell("on_end", None)

    ten, twenty, thirty = (
        {"step": step, "kind": "train", "loss": float(step), "unit": "tokens"} for step in (10, 20, 30)
    )
    write(0, [ten, twenty])  # without a folder
    assert heard == [10, 20] and len(said) == 1 and "TensorBoard" in said.pop()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        write(0, [ten], folder=tmp_path)
        assert len(said) == 1 and "TensorBoard" in said.pop()
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(0, [ten, twenty, thirty], folder=tmp_path)
    write(20, [{"step": 25, "kind": kind, "loss": 1.0} for kind in ("train", "eval")], folder=tmp_path)
    assert not said
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss/eval", "loss/train"]
    assert [event.step for event in events.Scalars("loss/train")] == [10, 20, 25]


Misspelled = type("Misspelled", (), {"on_log": print, "on_evaluate": print})
Needy = type("Needy", (), {"on_log": print, "__init__": lambda self, path: None})


@pytest.mark.parametrize(
    "name, said",
    [
        ("Missing", f"no callback '{__name__}:Missing'"),
        ("Clock", f"{__name__}:Clock: it has none of the methods on_begin"),
        ("Misspelled", "no method of a callback 'on_evaluate': did you mean 'on_evaluation'"),
        ("Needy", f"{__name__}:Needy: it is made without arguments: missing a required argument"),
    ],
)
def test_what_cannot_be_called_is_one_line(name, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        callbacks_of(Config("gpt-tiny", callback=f"{__name__}:{name}"))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------ progress


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def test_meter_weighs_losses_and_leaves_excluded_time_out():
    clock = Clock()
    meter = Meter(clock=clock)

    def read(*others):
        found = meter.read(*others)
        return [found[name] for name in ("loss", "rate", "seconds", "step_seconds")]

    meter.add([(torch.tensor(2.0, requires_grad=True), 3)], 100)
    meter.add([(4.0, 1)], 50)
    meter.add([(math.nan, 0)], 0)
    clock.now = 2.0
    with meter.excluded():
        clock.now = 11.0
    clock.now = 12.0
    assert read() == [2.5, 50.0, 3.0, 1.0]
    clock.now = 13.0
    meter.add([(2.0, 1)], 8)
    other = torch.tensor([9.0, 3.0, 16.0, 1.0, 2.0, *[0.0] * 6])  # a step of two seconds
    assert read(lambda own: torch.stack((own[0], other))) == [2.75, 24.0, 1.0, 1.5]
    assert all(map(math.isnan, read()[:2]))


RECORD = {
    "step": 20, "kind": "train", "loss": 2.34567, "rate": 12_345.0, "lr": 3e-4, "unit": "tokens", "memory": 3 << 29,
    "memory_of": "resident set", "seconds": 10.0, "clipped": 0.25,
}  # fmt: skip


def test_a_line_for_each_record(capsys):
    clock = Clock()
    with ProgressLines(100, 10, clock=clock) as line:
        line.advance(18)
        line.advance(19)
        assert capsys.readouterr().err == ""
        clock.now = 2.0
        line.show(RECORD)
        line.show({"step": 20, "kind": "eval", "loss": 1.5, "accuracy": 0.5, "seconds": 3.0, "samples": 64})
        line.say("[a] word")
    first, *others = capsys.readouterr().err.splitlines()
    assert first == (
        "step  20/100  loss 2.3457  12.3k tokens/s  lr 0.0003  peak 1.50 GiB (resident set)  clipped 0.25  0:00:16 left"
    )
    assert others == ["step  20/100  evaluation  loss 1.5  accuracy 0.5  over 64 samples", "[a] word"]


def test_a_line_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    """As after SIGHUP, when the terminal has gone."""

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with ProgressLines(100, 10) as line:
        line.show(RECORD)


def test_long_silence_prints_the_position_of_the_run(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("hvd_ckpt.utils.text.SECONDS", 0.01)
    with ProgressLines(100, 10) as line:
        line.advance(19)
        said = ""
        while said.count("\n") < 2:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert all(re.fullmatch(r"step  19/100  (\?|0:00:\d\d) left", one) for one in said.splitlines())
