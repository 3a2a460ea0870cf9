"""The example scripts run as they are written, with tiny settings."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ckpt.probe import find_launcher, launcher_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZE = r"[\d.]+ (?:B|KiB|MiB)"
COSTS = rf"peak {SIZE}, [\d.]+ s a step"

# Each script's settings, and patterns that its output has, each once.
SCRIPTS = {
    "bert_pretrain.py": (
        "--text text.txt --length 16 --batch 2 --width 16 --layers 1 --budget min --bf16",
        [rf"peak of a micro-batch: {SIZE} recomputed, {SIZE} kept"],
    ),
    "roberta_pretrain.py": (
        "--text text.txt --length 16 --batch 2 --folder model --precision bf16",
        [r"held-out loss [\d.]+, accuracy [\d.]+", r"RobertaForMaskedLM.from_pretrained: .*"],
    ),
    "xlnet_pretrain.py": (
        "--text text.txt --length 16 --width 16 --layers 2 --segments 2 --reentrant",
        [
            r"shared by 4 blocks: positions \(32, 8, 16\), query_mask \(16, 16, 8, 1\), "
            r"content_mask \(16, 16, 8, 1\), target_mapping \(2, 16, 8\)"
        ],
    ),
    "gpt_lite.py": (
        "--text text.txt --length 16 --batch 2 --width 16 --heads 2 --layers 2 --interval 1",
        [
            r"4 blocks, checkpoint interval 0: " + SIZE,
            r"4 blocks, checkpoint interval 1: " + SIZE,
            r"held-out loss [\d.]+",
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
        ["kept: " + COSTS, "recomputed: " + COSTS, r"held-out loss [\d.]+, Dice [\d.]+"],
    ),
    "memonger_word_lm.py": (
        "--text text.txt --words 50 --length 16 --batch 2 --width 16",
        ["kept: " + COSTS, "recomputed: " + COSTS, r"perplexity of held-out text: [\d.]+"],
    ),
}


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 100)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "roberta", "vocab_size": 262, "hidden_size": 16, "num_hidden_layers": 2, '
        '"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 18, "bos_token_id": 0}'
    )
    return tmp_path


def run_example(name, *arguments, ranks=1, folder=None):
    """Exit status and output; what another rank than 0 printed is marked ``[1]<stdout>``."""
    launcher = [*find_launcher(), "-np", str(ranks), "--gloo"] if ranks > 1 else []
    environment = {**launcher_environment(), "OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    result = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
        cwd=folder,
        env=environment,
    )
    return result.returncode, re.sub(
        r"^\[0\]<std(?:out|err)>:", "", result.stdout + result.stderr, flags=re.M
    )


def losses(output):
    return [float(value) for value in re.findall(r"^step 2.*? loss (\S+)", output, re.MULTILINE)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_on_two_ranks_and_rank_0_alone_tells_of_it(name, desk):
    settings, patterns = SCRIPTS[name]
    status, output = run_example(name, *settings.split(), "--steps", "2", ranks=2, folder=desk)
    assert status == 0, output
    assert losses(output) and all(map(math.isfinite, losses(output))), output
    assert "[1]<stdout>" not in output
    for pattern in patterns:
        assert len(re.findall(pattern, output)) == 1, (pattern, output)
    if name == "roberta_pretrain.py":
        (written,) = desk.glob("runs/*/model/model.safetensors")
        assert written.stat().st_size > 1000


def test_the_script_before_and_after_migration_prints_the_same_losses(desk):
    printed = []
    for version in ("before", "after"):
        status, output = run_example(
            "migrate_from_horovod.py", "--version", version, "--steps", "20", ranks=2, folder=desk
        )
        assert status == 0, output
        printed.append(re.findall(r"^step \d+: loss [\d.]+", output, re.MULTILINE))
    assert len(printed[0]) == 2 and printed[0] == printed[1]


def test_a_bad_flag_is_one_line(desk):
    status, output = run_example("gpt_lite.py", "--steps", "0", folder=desk)
    assert status == 2 and "steps 0: give a whole number from 1" in output and output.count("\n") == 1


def test_every_script_is_in_the_table_and_here():
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sbatch")}
    table = (EXAMPLES / "README.md").read_text()
    assert {name for name in scripts if f"`{name}`" not in table} == set()
    others = {"migrate_from_horovod.py", "slurm.sbatch", "test_memory_optimized_horovod_apex_comparison.py"}
    assert scripts == set(SCRIPTS) | others


@pytest.mark.parametrize(
    "launcher, command",
    [
        ("horovodrun", "horovodrun -np 8 -H node1:4,node2:4 python train.py --text 'two words'"),
        ("srun", "srun --mpi=pmix --cpus-per-task=8 python train.py --text 'two words'"),
    ],
)
def test_the_job_of_slurm_starts_all_ranks_on_its_nodes(launcher, command, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in {
        "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"',
        "horovodrun": 'printf "%s " horovodrun "${@@Q}"; echo "threads $OMP_NUM_THREADS"',
        "srun": 'printf "%s " srun "${@@Q}"; echo "threads $OMP_NUM_THREADS"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
        "LAUNCHER": launcher,
        "PATH": os.environ["PATH"],
    }
    result = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "train.py", "--text", "two words"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env=job,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.replace("'", "").split() == [*command.replace("'", "").split(), "threads", "8"]


def test_the_original_comparison_with_mixed_precision(tmp_path):
    status, output = run_example(
        "test_memory_optimized_horovod_apex_comparison.py",
        *("--quick", "--use_amp", "--chunks", "2", "--workloads", "bert", "--passes", "0"),
        *("--output", str(tmp_path / "report")),
    )
    assert status == 0, output
    assert "hvd_ckpt is right in all 3 cells." in output
    page = (tmp_path / "report" / "report.md").read_text()
    assert "- precision: fp16" in page or "- precision: apex-O1" in page
    assert "apex is absent" in page or "| apex |" in page
