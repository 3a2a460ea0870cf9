"""``hvd-ckpt train --pipeline`` and ``--replicas``: the bits of one process, resumed in any number of stages and on any number of
ranks. Errors that end all stages: test_endings.py."""

from __future__ import annotations

import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from controllers import start_ranks
from safetensors.torch import load_file
from same import assert_same
from snapshot_files import read_snapshot

from hvd_ckpt.app.training.logs import read
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.reader import open_snapshot

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults.checks import differences

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "train_runs.py"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 400
STEPS, STOPPED = 4, 2

TOKENS = ["--sequence-length=8", *(f"--model-option={one}" for one in ("width=16", "heads=2", "layers=3"))]
ADAM = ["--optimizer=adamw", "--lr=0.01"]
SGD = ["--optimizer=sgd", "--lr=0.1", "--weight-decay=0"]  # rounding stays rounding
MODELS: dict[str, tuple[list[str], list[str]]] = {  # settings, and those of the pipeline
    "gpt2-tiny": ([*TOKENS, *SGD], ["--pipeline=2,schedule=interleaved"]),
    "gpt-tiny": (
        [*TOKENS, *ADAM, "--model-option=tied=false", "--model-option=dropout=0.1", "--ema=0.8",
         f"--snapshot-every={STOPPED}", "--log-every=3", "--eval-every=2", "--clip=0.5"],
        ["--budget=min"],
    ),
    "lstm-small": (["--sequence-length=8", "--model-option=width=16", *ADAM], []),
    "resnet-20": (
        ["--pixels=8", "--batch-norm=deferred", "--precision=fp16", "--clip=1", f"--snapshot-every={STOPPED}", *ADAM],
        ["--pipeline=2,balance=[5,6]", "--checkpoint=auto"],
    ),
    "own_models:unet": (
        ["--data=own_models:shapes", "--loss=own_models:pixel_loss", "--metric=iou=own_models:iou",
         "--model-option=width=4", *ADAM],
        [],
    ),
}  # fmt: skip
RESUMED = ("gpt-tiny", "resnet-20")
COMMON = [f"--steps={STEPS}", "--eval-batches=1", "--keep-snapshots=9"]
STAGED = [*COMMON, "--batch=6", "--accumulate=3"]
SMALL = ["--sequence-length=16", "--model-option=width=16", "--model-option=heads=2", "--batch=2"]
REPLICATED = {
    "gpt-tiny": [*SMALL, "--clip=0.5", "--model-option=dropout=0.1", "--segments=2,reentrant=true", "--precision=fp16"],
    "bert-tiny": [*SMALL, "--budget=min", "--shard=gradients", "--accumulate=2", "--ema=0.9"],
    "resnet-20": ["--pixels=8", "--batch=4", "--batch-norm=deferred", "--accumulate=2", "--optimizer=sgd"],
}  # fmt: skip
REPLICAS = [*COMMON, "--replicas=4", f"--snapshot-every={STOPPED}", "--log-every=1", "--eval-every=2"]
Run = dict[str, Any]


def run_of(folder: Path, job: str, name: str, *settings: str) -> Run:
    """A run of a job that trains the model of this name."""
    text = [f"--data=text:{folder / 'text.txt'}"] if "--sequence-length" in "".join(settings) else []
    return {"arguments": [f"--model={name}", *text, *settings, f"--output={folder / job / name}"]}


def resumed(
    folder: Path, job: str, other: str, run: str, *own: str, name: str = "", step: int = STOPPED
) -> Run:
    """A run of another job that goes on in this one."""
    to = folder / job / (name or f"{run}-resumed")
    copy = {"copy": [str(folder / other / run), str(to)], "step": step, "steps": STEPS}
    return {**copy, "arguments": [f"--resume={to}", *own]}


def run_jobs(folder: Path, jobs: dict[str, tuple[int, int, list[Run]]]) -> None:
    """Jobs side by side: ranks, pipeline stages and runs of each."""
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 60)
    started = []
    for name, (ranks, stages, runs) in jobs.items():
        (folder / name).mkdir()
        file = folder / f"{name}.json"
        file.write_text(json.dumps(runs), "utf-8")
        started.append(start_ranks(ranks, SCRIPT, str(stages), str(file), PYTHONPATH=str(EXAMPLES)))
    with ThreadPoolExecutor(len(started)) as pool:
        said = [pool.submit(job.communicate) for job in started]
        limit = time.monotonic() + SECONDS
        while any(job.poll() is None for job in started):
            if any(job.returncode for job in started) or time.monotonic() > limit:
                for job in started:  # which may wait for each other's runs
                    job.terminate()
            time.sleep(0.1)
    failed = [output.result()[0] for job, output in zip(started, said) if job.returncode]
    assert not failed, "\n\n".join(failed)


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return read_snapshot(run / "snapshots" / f"step-{step:08d}").weights


def records(run: Path) -> list[dict[str, Any]]:
    kept = ["step", "kind", "loss", "lr", "accuracy", "dice", "perplexity", "iou", "samples", "ema_loss"]
    return [{key: one[key] for key in kept if key in one} for one in read(run / "log.jsonl")]


def averages(folder: Path, run: Path) -> dict[str, torch.Tensor]:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    export(open_snapshot(run / "snapshots" / f"step-{STEPS:08d}"), file, ema=True)
    return load_file(file)


def test_models_train_in_two_stages_with_the_bits_of_one(tmp_path: Path) -> None:
    """With the same log; and a run goes on in another number of stages as if it had always been there."""
    whole = [run_of(tmp_path, "whole", name, *STAGED, *settings) for name, (settings, _) in MODELS.items()]
    staged = [
        run_of(tmp_path, "staged", name, *STAGED, *settings, "--pipeline=2", *own)
        for name, (settings, own) in MODELS.items()
    ]
    for name in RESUMED:
        whole.append(resumed(tmp_path, "whole", "staged", name, "--pipeline=1", "--checkpoint=always"))
        staged.append(resumed(tmp_path, "staged", "whole", name, "--pipeline=2"))
    many = ["--pipeline=2,schedule=interleaved,virtual_stages=99"]
    lstm = [*STAGED, *MODELS["lstm-small"][0]]
    staged.append({**run_of(tmp_path, "refused", "lstm-small", *lstm, *many), "refused": "blocks"})
    run_jobs(tmp_path, {"whole": (1, 1, whole), "staged": (2, 2, staged)})
    for name in MODELS:
        one, two = tmp_path / "whole" / name, tmp_path / "staged" / name
        written = read_snapshot(two / "snapshots" / f"step-{STEPS:08d}")
        assert written.manifest is not None and written.manifest.layout.pipeline_stages == 2
        tied = bool(written.manifest.aliases)
        assert tied == (name == "gpt2-tiny")
        assert_same(written.weights, weights(one), 1e-4 if tied else 0.0)
        if not tied:
            assert records(one) == records(two), name
    assert Plan.load(tmp_path / "staged" / "gpt-tiny" / "plan.json").pipeline is not None
    for name, job in itertools.product(RESUMED, ("whole", "staged")):
        run, unstopped = tmp_path / job / f"{name}-resumed", tmp_path / "whole" / name
        assert_same(weights(run), weights(unstopped))
        assert records(run) == [one for one in records(unstopped) if one["step"] > STOPPED]
    assert_same(*(averages(tmp_path, tmp_path / job / "gpt-tiny") for job in ("whole", "staged")))


def test_replicas_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """And in the middle of a run of another number."""
    one, four = (
        [run_of(tmp_path, job, name, *REPLICAS, *settings) for name, settings in REPLICATED.items()]
        for job in ("one", "four")
    )
    four += [resumed(tmp_path, "four", "one", name) for name in REPLICATED]
    run_jobs(tmp_path, {"one": (1, 1, one), "four": (4, 1, four)})
    for name in REPLICATED:
        alone, shared = tmp_path / "one" / name, tmp_path / "four" / name
        # A plan has measured seconds; the two recompute different calls, and come to the same.
        assert [name for name in differences(shared, alone, STEPS, None) if name != "plan"] == []
        # Its log has the steps from the middle on.
        found = differences(Path(f"{shared}-resumed"), alone, STEPS, None)
        assert [name for name in found if name != "plan"] == ["the steps in the log"]
