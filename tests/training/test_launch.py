"""``hvd-ckpt train`` as jobs: pipeline stages and replicas with the bits of one process, an elastic job with local SGD, and errors
that end all ranks."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from controllers import HOROVODRUN, SCRIPTS, probe, run_ranks, start_ranks
from safetensors.torch import load_file
from same import assert_same
from snapshot_files import read_snapshot

from hvd_ckpt.app.training.logs import read
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import name_of
from hvd_ckpt.snapshots.reader import open_snapshot

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults.checks import differences

pytestmark = pytest.mark.launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BYTES = bytes(range(32, 127)) * 60

# ------------------------------------------------------------------------------------ stages and replicas

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


def resumed(folder: Path, job: str, other: str, run: str, *own: str) -> Run:
    """A run of another job that goes on in this one."""
    to = folder / job / f"{run}-resumed"
    copy = {"copy": [str(folder / other / run), str(to)], "step": STOPPED, "steps": STEPS}
    return {**copy, "arguments": [f"--resume={to}", *own]}


def run_jobs(folder: Path, jobs: dict[str, tuple[int, int, list[Run]]]) -> None:
    """Jobs side by side: ranks, pipeline stages and runs of each."""
    (folder / "text.txt").write_bytes(BYTES)
    started = []
    for name, (ranks, stages, runs) in jobs.items():
        (folder / name).mkdir()
        file = folder / f"{name}.json"
        file.write_text(json.dumps(runs), "utf-8")
        words = str(stages), str(file)
        started.append(start_ranks(ranks, SCRIPTS / "train_runs.py", *words, PYTHONPATH=str(EXAMPLES)))
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


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_snapshot(run / "snapshots" / name_of(STEPS)).weights


def records(run: Path) -> list[dict[str, Any]]:
    kept = ["step", "kind", "loss", "lr", "accuracy", "dice", "perplexity", "iou", "samples", "ema_loss"]
    return [{key: one[key] for key in kept if key in one} for one in read(run / "log.jsonl")]


def averages(folder: Path, run: Path) -> dict[str, torch.Tensor]:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    export(open_snapshot(run / "snapshots" / name_of(STEPS)), file, ema=True)
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
        written = read_snapshot(two / "snapshots" / name_of(STEPS))
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
        assert [name for name in found if name != "plan"] == ["steps in the log", "losses: its names"]


# ------------------------------------------------------------------------------------ local SGD

PROGRAM = Path(sys.executable).parent / "hvd-ckpt"
LOCAL_STEPS = 14
MINE = """
import os, signal
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional

steps = 0

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))

def samples():
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    return [(one, torch.tensor(number % 4)) for number, one in enumerate(inputs)]

def loss(output, targets):
    global steps
    steps += torch.is_grad_enabled()
    if steps == 9 and hvd.rank() == 1 and Path("kill").exists():
        Path("kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return functional.cross_entropy(output, targets)
"""
LOCAL = f"""--model=mine:make --data=mine:samples --loss=mine:loss --batch=4 --schedule=constant --steps={LOCAL_STEPS}
--local=5,outer_lr=0.7,outer_momentum=0.9,wire=int8 --blocking-snapshots --snapshot-every=5 --keep-snapshots=9 --log-every=5"""


def test_an_elastic_job_goes_on_from_the_last_average(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("mine.py").write_text(MINE)
    Path("kill").touch()
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")  # two hosts to Horovod
    script.chmod(0o755)
    launcher = [*HOROVODRUN, "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    command = [*launcher, "--host-discovery-script", script, PROGRAM, "train", *LOCAL.split(), "--output=run"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Resumes after step 5 on 1 ranks, learning rate x 1." in job.stdout  # the rank was lost in step 9
    assert not Path("kill").exists()

    shutil.copytree("run/snapshots/step-00000005", "again/snapshots/step-00000005")
    shutil.copy("run/config.yaml", "again")
    status, output = run_ranks(1, PROGRAM, "train", "--resume=again")
    assert status == 0, output
    ends = [read_snapshot(Path(run, "snapshots", name_of(LOCAL_STEPS)), 0) for run in ("run", "again")]
    for kind in {name.partition("/")[0] for name in ends[0].manifest.tensors}:
        assert_same(*(end.whole_tensors(kind) for end in ends), place=kind)
    assert ends[0].replicated["progress"]["position"] == 4 * (2 * 5 + LOCAL_STEPS - 5)


# ------------------------------------------------------------------------------------ errors

MARK = "HVD_CKPT_TEST_OF_ENDINGS"


@pytest.mark.parametrize(
    "place, controller, layout", [("writer", "gloo", []), ("backward", "mpi", ["--pipeline=2"])]
)
def test_an_error_on_one_rank_ends_all(place, controller, layout, tmp_path) -> None:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_bytes(BYTES)
    scratch.mkdir()
    settings = "--model gpt-tiny --model-option layers=1 --sequence-length 16 --steps 999999 --batch 2"
    settings += f" --snapshot-every 2 --data text:{text} --output {tmp_path / 'run'}"
    environment = {
        MARK: str(tmp_path),
        "TMPDIR": str(scratch),
        "OMPI_MCA_btl_vader_backing_directory": str(scratch),  # for its shared memory
    }
    words = [place, *settings.split(), *layout]
    status, output = run_ranks(2, SCRIPTS / "fail_somewhere.py", *words, controller=controller, **environment)
    assert status != 0
    lines = output.splitlines()
    assert sum(line.endswith(">:RuntimeError: planted on rank 1") for line in lines) == 1, output
    assert sum("rank 1 on host" in line and "ended by this error" in line for line in lines) == 1
    of_other = [line for line in lines if "rank 0 on host" in line]
    assert len(of_other) <= 1 and "Traceback" not in "".join(of_other)
    tracebacks = [line for line in lines if ">:" in line and "Traceback" in line]  # horovodrun adds its own
    assert len(tracebacks) == 1, output
    started = [process for process in psutil.process_iter() if has_mark(process, tmp_path)]
    assert not psutil.wait_procs(started, timeout=60)[1]  # mpirun does not wait for ranks that it has killed
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir() if ".tmp-" in path.name] == []


def has_mark(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder)
    except psutil.Error:
        return False


def said_by_ranks(job: subprocess.Popen[str]) -> str:
    """What the ranks of a job that failed said, without the launcher's tags and its own traceback."""
    output, _ = job.communicate(timeout=300)
    assert job.returncode != 0, output
    output = re.sub(r"\[(1,)?\d\]<std(out|err)>:", "", output)
    return output.partition('Traceback (most recent call last):\n  File "' + HOROVODRUN[-1])[0]


def test_an_error_of_several_ranks_of_a_script_is_shown_once_and_another_one_too() -> None:
    """A hook of one's own hears every rank."""
    with (
        start_ranks(3, SCRIPTS / "uncaught.py", "differ") as differ,
        start_ranks(2, SCRIPTS / "uncaught.py", "hook") as hook,
    ):
        said, heard = said_by_ranks(differ), said_by_ranks(hook)
    assert said.count("Traceback (most recent call last)") == 2, said
    assert said.count("KeyError: 'planted on the last rank'") == 1
    assert len(re.findall(r"(?m)^rank 2 on host .+: ended by this error:$", said)) == 1, said
    assert said.count("ValueError: planted on ranks") == 2
    others = re.findall(r"(?m)^rank [01] on host .+: ended by the same error: ValueError: planted", said)
    assert len(others) == 1
    assert heard.count("own hook: planted on ranks") == 2 and "Traceback" not in heard, heard
