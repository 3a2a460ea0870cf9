"""Settings of a training run: files, values, and errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_ckpt.app.training.config import BATCH_NORMS, Config, ConfigError, read_yaml
from hvd_ckpt.parallel.pipeline.schedule import NAMES as PIPELINE_SCHEDULES
from hvd_ckpt.utils.plain_data import parsed
from hvd_ckpt.utils.text import CHECKPOINTS, PRECISIONS, SCHEDULES, STAGES


def error_of(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_setting_has_a_help_and_survives_a_file(tmp_path: Path) -> None:
    options = {"layers": 2}
    config = Config("bert-small", model_options=options, lr=1e-4, budget="0.3x", accumulate=2, steps=7)
    help_of = {name: " ".join(str(field.description).split()) for name, field in Config.model_fields.items()}
    assert "None" not in help_of.values()
    for name, allowed in (("schedule", SCHEDULES), ("precision", PRECISIONS), ("checkpoint", CHECKPOINTS),
                          ("batch_norm", BATCH_NORMS), ("shard", STAGES), ("pipeline", PIPELINE_SCHEDULES)):  # fmt: skip
        assert ", ".join(allowed) in help_of[name]
    config.write_yaml(tmp_path / "config.yaml")
    assert Config.make(read_yaml(tmp_path / "config.yaml")) == config
    assert Config.make(config.as_dict()) == config


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-4 for a text."""
    (tmp_path / "run.yaml").write_text(
        "model: gpt-tiny\nlr: 1e-4\nweight-decay: 0\nbudget: 0.3x\nprofile: 10:15\n"
        "optimizer_options: {eps: 1e-6, betas: [0.9, 98e-2]}\n"
    )
    config = Config.make(read_yaml(tmp_path / "run.yaml"))
    assert (config.lr, config.weight_decay, str(config.budget)) == (1e-4, 0.0, "0.3x")
    assert config.profile == "10:15"
    assert config.optimizer_options == {"eps": 1e-6, "betas": [0.9, 0.98]}
    assert parsed("1e-6") == 1e-6 and parsed("[1, 2e3]") == [1, 2000.0] and parsed("relu") == "relu"


@pytest.mark.parametrize(
    "values, said",
    [
        ({"model": None}, "model is missing"),
        ({"model": "gpt\ud800"}, "'gpt\\ud800' is not allowed: give a text, in UTF-8"),
        ({"length": 8}, "no setting 'length': did you mean 'sequence_length'?"),
        ({"held-out": 0.1}, "no setting 'held-out': did you mean 'validation_split'?"),
        ({"max-grad-norm": 8}, "no setting 'max-grad-norm': did you mean 'clip'"),
        ({"learning_rate": 0.1}, "no setting 'learning_rate': did you mean 'lr'?"),
        ({"bugdet": "0.3x"}, "no setting 'bugdet': did you mean 'budget'?"),
        ({"batch": 0}, "batch is 0,"),
        ({"batch": "many"}, 'batch is "many"'),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"lr": 0}, "lr is 0,"),
        ({"schedule": "cosin"}, "did you mean 'cosine'?"),
        ({"budget": "a lot"}, "'a lot'"),
        ({"accumulate": 9}, "accumulate 9"),
        ({"shard": 4}, "not 4"),
        ({"pipeline": "2,schedule=zb"}, "no pipeline schedule 'zb'"),
        ({"pipeline": "2,schedule=interleaved,balance=[3,4]"}, "give one for each of 4"),
        ({"replicas": 6}, "replicas 6: it is not a power of two"),
        ({"local": 0}, "local.every is 0,"),
        ({"local": "4,outer_lr=0.7,outer_momentum=1.0"}, "local.outer_momentum is 1.0"),
        ({"local": "4,fragments=5"}, "fragments 5: give at most the 4 steps"),
        ({"local": {"every": 4, "delay": 5}}, "delay 5: give at most the 4 steps"),
        ({"local": "4,frag=2"}, "local: no option 'frag': did you mean 'fragments'"),
        ({"data": "book.txt"}, "give KIND:PATH, where KIND is one of text,"),
        ({"data": "text:a,vocabulary=5"}, "vocabulary 5: it is of token ids"),
        ({"data": "tokens:a,type=int3"}, "no type of token ids 'int3'"),
        ({"local_steps": 4}, "did you mean 'local N'?"),
        ({"text": "a"}, "did you mean 'data text:PATH'?"),
        ({"local": "4,within=rack"}, "within: 'rack' is not allowed"),
        ({"local": {"every": 4, "within": [[0, "1"]]}}, "within: [[0, '1']] is not allowed"),
        ({"shard": "2,wire=fp8"}, "no communication format 'fp8'"),
        ({"offload": "optimizer"}, "did you mean 'shard VALUE,offload=VALUE'?"),
        ({"chunks": 8}, "did you mean 'accumulate'"),
        ({"max_restarts": 3}, "no setting 'max_restarts': repeat hvd-ckpt train --resume RUN"),
        ({"profile": "10:9"}, "profile: '10:9' is not allowed"),
        ({"profile": "9"}, "profile: '9' is not allowed"),
    ],
)
def test_invalid_settings_are_one_line(values: dict[str, object], said: str) -> None:
    assert said in error_of(lambda: Config.make({"model": "gpt-tiny", **values}))


def test_shard_may_be_a_number() -> None:
    made = [Config("gpt-tiny", shard=given) for given in ("none", 1, "2", "parameters")]
    assert [str(config.shard) for config in made] == ["", "optimizer", "gradients", "parameters"]
    assert [config.shard.stage for config in made] == [0, 1, 2, 3]
    for options in (
        "parameters,wire=int8,within=[[0,1],[2,3]]",
        "optimizer,offload=optimizer,folder=/a disk, or two",
    ):
        assert str(Config("gpt-tiny", shard=options).shard) == options
    data = Config("gpt-tiny", data="tokens:/a,year=2020/b,month=1.bin,vocabulary=5").data
    assert (data.source, data.vocabulary) == ("tokens:/a,year=2020/b,month=1.bin", 5)


ALIASES = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi")]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "holds no settings"),
        (b"model: [", "line 1, is not valid YAML"),
        (b"model: a\nbatch: 1\nbatch: 2\n", "line 3, is not valid YAML: 'batch' is given twice"),
        (b"\xff\xfe", "is not valid YAML"),
        (b"model: !!python/object/apply:os.system ['touch ran']\n", "is not valid YAML"),
        (b"[" * 5000, "is not valid YAML"),
        (b"x" * (1 << 20) + b"x", "larger than 1 MiB"),
        ("\n".join(["a: &a [x, x]", *ALIASES]).encode(), "aliases are not allowed"),
        (b"model_options: &a {x: *a}", "aliases are not allowed"),
    ],
)
def test_broken_files_are_one_line_and_run_nothing(content, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(content)
    assert said in error_of(lambda: Config.make(read_yaml("run.yaml")))
    assert not (tmp_path / "ran").exists()


def test_devices_and_missing_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "is a folder or a device" in error_of(lambda path=path: read_yaml(path))
    said = error_of(lambda: read_yaml(tmp_path / "none.yaml"))
    assert said.startswith("cannot read the configuration") and "No such file" in said
