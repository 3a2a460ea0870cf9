"""Settings of a training run: files, values, and errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_ckpt.app.training.config import Config, ConfigError, read_yaml
from hvd_ckpt.utils.plain_data import parsed


def error_of(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.make(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_setting_has_a_help_and_survives_a_file(tmp_path: Path) -> None:
    options = {"layers": 2}
    config = Config("bert-small", model_options=options, lr=1e-4, budget="0.3x", accumulate=2, steps=7)
    assert all(field.description for field in Config.model_fields.values())
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
    assert (config.lr, config.weight_decay, config.budget) == (1e-4, 0.0, "0.3x")
    assert config.profile == "10:15"
    assert config.optimizer_options == {"eps": 1e-6, "betas": [0.9, 0.98]}
    assert parsed("1e-6") == 1e-6 and parsed("[1, 2e3]") == [1, 2000.0] and parsed("relu") == "relu"


@pytest.mark.parametrize(
    "values, said",
    [
        ({"model": None}, "model is missing"),
        ({"model": "gpt\ud800"}, "'gpt\\ud800' is not allowed: give a text, in UTF-8"),
        ({"documents": "\ud800"}, "no form of documents '\\ud800'"),
        ({"length": 8}, "no setting 'length': did you mean 'sequence_length'?"),
        ({"held-out": 0.1}, "no setting 'held-out': did you mean 'validation_split'?"),
        ({"learning_rate": 0.1}, "no setting 'learning_rate': did you mean 'lr'?"),
        ({"bugdet": "0.3x"}, "no setting 'bugdet': did you mean 'budget'?"),
        ({"batch": 0}, "batch is 0,"),
        ({"batch": "many"}, 'batch is "many"'),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"lr": 0}, "lr is 0,"),
        ({"schedule": "cosin"}, "did you mean 'cosine'?"),
        ({"budget": "a lot"}, "'a lot'"),
        ({"steps": 3, "epochs": 1}, "steps 3 and epochs 1"),
        ({"budget": "min", "segments": 2}, "budget and segments"),
        ({"reentrant": True}, "give segments"),
        ({"accumulate": 9}, "accumulate 9"),
        ({"resume": "a", "output": "b"}, "output b"),
        ({"shard": 4}, "not 4"),
        ({"offload": "optimizer"}, "offload optimizer"),
        ({"offload": "parameters", "shard": 2}, "offload parameters"),
        ({"shard": 1, "wire": "int8"}, "wire int8"),
        ({"accumulate_locally": True}, "accumulate_locally"),
        ({"shard": 2, "compression": "fp16"}, "compression fp16"),
        ({"shard": 1, "precision": "apex-O1"}, "shard optimizer"),
        ({"pipeline_schedule": "gpipe"}, "pipeline_schedule gpipe"),
        ({"stages": 2, "pipeline_schedule": "zb"}, "no pipeline schedule 'zb'"),
        ({"stages": 2, "virtual_stages": 2}, "virtual_stages 2"),
        ({"stages": 2, "pipeline_schedule": "interleaved", "balance": [3, 4]}, "give one for each of 4"),
        ({"stages": 2, "segments": 2}, "segments 2"),
        ({"stages": 2, "budget": "1GiB", "balance": [3, 4]}, "balance [3, 4]"),
        ({"stages": 2, "budget": "1GiB", "checkpoint": "never"}, "checkpoint never"),
        ({"stages": 2, "precision": "apex-O1"}, "stages 2"),
        ({"stages": 2, "optimizer": "adafactor"}, "optimizer adafactor"),
        ({"replicas": 6}, "replicas 6: it is not a power of two"),
        ({"replicas": 4, "stages": 2}, "replicas 4 and stages 2"),
        ({"replicas": 4, "shard": 3}, "replicas 4 and shard parameters"),
        ({"replicas": 4, "shard": 2, "wire": "bf16"}, "replicas 4 and wire bf16"),
        ({"replicas": 4, "compression": "fp16"}, "replicas 4 and compression fp16"),
        ({"replicas": 4, "batch_norm": "synchronized"}, "replicas 4 and batch_norm synchronized"),
        ({"replicas": 4, "precision": "apex-O1"}, "replicas 4 and precision apex-O1"),
        ({"local_steps": 0}, "local_steps is 0,"),
        ({"delay": 1}, "delay 1: it is for local SGD"),
        ({"outer_lr": 0.7}, "outer_lr 0.7: it is for local SGD"),
        ({"local_steps": 4, "outer_momentum": 0.9}, "give outer_lr as well"),
        ({"local_steps": 4, "outer_lr": 0.7, "outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"local_steps": 4, "fragments": 5}, "fragments 5: give at most local_steps, 4"),
        ({"local_steps": 4, "delay": 5}, "delay 5: give at most local_steps, 4"),
        ({"local_steps": 4, "within": "rack"}, "within: 'rack' is not allowed"),
        ({"local_steps": 4, "within": [[0, "1"]]}, "within: [[0, '1']] is not allowed"),
        ({"shard": 2, "within": "host"}, "within host: it is for local SGD and for shard parameters"),
        ({"local_steps": 4, "wire": "int4"}, "local_steps 4 and wire int4"),
        ({"local_steps": 4, "shard": 1}, "give within as well"),
        ({"local_steps": 4, "stages": 2}, "local_steps 4 and stages 2"),
        (
            {"local_steps": 4, "offload": "optimizer"},
            "offload optimizer: it is for sharded runs, give shard optimizer or more",
        ),
        ({"local_steps": 4, "replicas": 2}, "local_steps 4 and replicas 2"),
        ({"local_steps": 4, "ema": 0.9}, "local_steps 4 and ema 0.9"),
        ({"local_steps": 4, "compression": "fp16"}, "give wire fp16"),
        ({"local_steps": 4, "bucket_cap_mb": 1.0}, "local_steps 4 and bucket_cap_mb 1.0"),
        ({"local_steps": 4, "batch_norm": "synchronized"}, "local_steps 4 and batch_norm synchronized"),
        ({"local_steps": 4, "check_weights": 4}, "local_steps 4 and check_weights 4"),
        ({"local_steps": 4, "precision": "apex-O1"}, "local_steps 4 and precision apex-O1"),
        ({"chunks": 8}, "did you mean 'accumulate'"),
        ({"profile": "10:9"}, "profile: '10:9' is not allowed"),
        ({"profile": "9"}, "profile: '9' is not allowed"),
    ],
)
def test_invalid_settings_are_one_line(values: dict[str, object], said: str) -> None:
    assert said in error_of(**{"model": "gpt-tiny", **values})


def test_shard_may_be_a_number() -> None:
    made = [Config("gpt-tiny", shard=given) for given in ("none", 1, "2", "parameters")]
    assert [config.shard for config in made] == ["none", "optimizer", "gradients", "parameters"]
    assert [config.shard_stage for config in made] == [0, 1, 2, 3]


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
    ],
)
def test_broken_files_are_one_line_and_run_nothing(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.make(read_yaml("run.yaml"))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_aliases_devices_and_missing_files_are_refused(tmp_path: Path) -> None:
    lines = ["a: &a [x, x]"] + [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi")
    ]
    file = tmp_path / "run.yaml"
    for content in ("\n".join(lines), "model_options: &a {x: *a}"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="aliases are not allowed"):
            read_yaml(file)
    with pytest.raises(ConfigError, match="cannot read the configuration .*No such file"):
        read_yaml(tmp_path / "none.yaml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is a folder or a device"):
            read_yaml(path)
