"""Tests of the example scripts on two ranks with tiny settings: training, output and files."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest

import hvd_ckpt as hc

pytestmark = [
    pytest.mark.usefixtures("quick_planner"),
    pytest.mark.ranks(gloo=(2,)),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZE = r"[\d.]+ MiB"
COSTS = rf"peak {SIZE}, [\d.]+ s a step"

TEXT = "--text text.txt --length 16"

# Each script's settings, and patterns that its output has, each once.
SCRIPTS = {
    "bert_pretrain.py": (
        f"{TEXT} --batch 2 --width 16 --layers 1 --budget min --bf16",
        [rf"peak of a micro-batch: {SIZE} recomputed, {SIZE} kept"],
    ),
    "roberta_pretrain.py": (
        f"{TEXT} --batch 2 --folder model --precision bf16",
        [r"validation loss [\d.]+, accuracy [\d.]+", r"RobertaForMaskedLM.from_pretrained: .*"],
    ),
    "xlnet_pretrain.py": (
        f"{TEXT} --width 16 --layers 2 --segments 2 --reentrant",
        [
            r"shared by 4 blocks: positions \(32, 8, 16\), query_mask \(16, 16, 8, 1\), "
            r"content_mask \(16, 16, 8, 1\), target_mapping \(2, 16, 8\)"
        ],
    ),
    "gpt_lite.py": (
        f"{TEXT} --batch 2 --width 16 --heads 2 --layers 2 --interval 1",
        [
            *(f"4 blocks, checkpoint interval {interval}: {SIZE}" for interval in (0, 1)),
            r"validation loss [\d.]+",
        ],
    ),
    "memonger_densenet.py": (
        "--depth 22 --efficient --pixels 8 --batch 2",
        ["recomputed never: " + COSTS, "recomputed always: " + COSTS],
    ),
    "memonger_resnet.py": (
        "--depth 20 --pixels 8 --batch 2",
        [f"11 blocks in {segments}: {COSTS}" for segments in ("1 segment", "2 segments", "3 segments")],
    ),
    "memonger_vnet.py": (
        "--pixels 16 --width 2 --batch 2",
        ["kept: " + COSTS, "recomputed: " + COSTS, r"validation loss [\d.]+, Dice [\d.]+"],
    ),
    "memonger_word_lm.py": (
        f"{TEXT} --words 50 --batch 2 --width 16",
        ["kept: " + COSTS, "recomputed: " + COSTS, r"validation perplexity: [\d.]+"],
    ),
    "fine_tuning.py": ("--eval-every 2 --shard parameters", [r"step 2: averaged weights, loss [\d.]+"]),
}


@pytest.fixture
def desk(folder, monkeypatch):
    if hc.rank() == 0:
        (folder / "text.txt").write_text("To be, or not to be: that is the question. " * 100)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(
            '{"model_type": "roberta", "vocab_size": 262, "hidden_size": 16, "num_hidden_layers": 2, '
            '"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 18, "bos_token_id": 0}'
        )
    hc.barrier()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def main_of(name):
    return runpy.run_path(str(EXAMPLES / name), run_name="example")["main"].main


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_and_rank_0_alone_tells_of_it(name, desk, capsys):
    settings, patterns = SCRIPTS[name]
    main_of(name)([*settings.split(), "--steps", "2"], standalone_mode=False)
    hc.barrier()
    printed = capsys.readouterr()
    output = printed.out + printed.err
    if hc.rank() != 0:
        assert printed.out == ""
        return
    losses = re.findall(r"^step 2.*? loss (\S+)", output, re.MULTILINE)
    assert losses and all(math.isfinite(float(loss)) for loss in losses), output
    for pattern in patterns:
        assert len(re.findall(pattern, output)) == 1, (pattern, output)
    if name == "roberta_pretrain.py":
        (written,) = desk.glob("runs/*/model/model.safetensors")
        assert written.stat().st_size > 1000


def test_a_loop_of_ones_own_has_nothing_left_to_do_when_it_is_started_again(desk, capsys):
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main_of("own_loop.py")(["--folder", "run", "--epochs", "1"], standalone_mode=False)
        assert ended.value.code == 0
        hc.barrier()
    found = re.findall(r"^step (\d+): loss", capsys.readouterr().out, re.MULTILINE)
    assert found == (["2", "20", "40"] if hc.rank() == 0 else [])
    assert (desk / "run" / "snapshots" / "step-00000056").is_dir()


def test_the_script_before_and_after_migration_prints_the_same_losses(capsys):
    losses = []
    for version in ("before", "after"):
        main_of("migrate_from_horovod.py")(["--version", version, "--steps", "20"], standalone_mode=False)
        losses.append(re.findall(r"^step \d+: loss [\d.]+$", capsys.readouterr().out, re.MULTILINE))
    assert losses[0] == losses[1] and len(losses[0]) == (2 if hc.rank() == 0 else 0)


def test_examples_use_public_names_only():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        for public in ("import hvd_ckpt as hc", "from hvd_ckpt.app.integrations.transformers import Trainer"):
            text = text.replace(public, "")
        assert "hvd_ckpt." not in text, path
        for name in re.findall(r"\bhc\.(\w+)", text):
            assert name in hc.__all__, (path, name)


def test_every_script_is_in_the_table_and_here():
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sbatch")}
    table = (EXAMPLES / "README.md").read_text()
    assert {name for name in scripts if f"`{name}`" not in table} == set()
    others = {"migrate_from_horovod.py", "slurm.sbatch", "test_memory_optimized_horovod_apex_comparison.py"}
    others |= {"hugging_face_trainer.py", "own_loop.py", "own_loop_replicas.py"}  # in this folder
    others |= {"own_data.py", "own_models.py"}  # tests/training
    others |= {"tensor_gpt.py"}  # tests/parallel/pipeline/test_parallel_launch.py
    assert scripts == set(SCRIPTS) | others
