"""The ranks' part of ``python -m benchmarks replicas``: trains, whole and resumed, and hashes what comes of it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.case import Case
from benchmarks.curves import losses_of
from benchmarks.tensors import tensors_of
from benchmarks.worker import Found, MeasuredJob
from hvd_ckpt.app.training import logs
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.logs import TIMES
from hvd_ckpt.app.training.trainer import Trainer

TEXT = bytes(range(32, 127)) * 40
NOT_BITS = ("rate", "memory", "seconds", *TIMES)  # of a log entry
SMALL_TEXT: dict[str, Any] = {"sequence_length": 16, "batch": 2, "clip": 0.5}
IMAGES: dict[str, Any] = {"pixels": 8, "batch": 2, "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
GPT = {"width": 16, "heads": 2, "layers": 2, "dropout": 0.1}

RUNS: dict[str, dict[str, Any]] = {
    "gpt-clipped": {"model": "gpt-tiny", "model_options": GPT, **SMALL_TEXT},
    "gpt-bf16": {
        "model": "gpt-tiny", "model_options": {**GPT, "tied": True}, **SMALL_TEXT, "precision": "bf16", "accumulate": 2, "ema": 0.9,
    },
    "gpt-fp16": {
        "model": "gpt-tiny", "model_options": GPT, **SMALL_TEXT, "segments": "2,reentrant=true", "precision": "fp16",
        "overflows": True,
    },
    "bert-plan": {
        "model": "bert-tiny", "model_options": {"width": 16, "heads": 2}, **SMALL_TEXT, "budget": "min", "shard": "optimizer",
    },
    "bert-shards": {
        "model": "bert-tiny", "model_options": {"width": 16, "heads": 2}, **SMALL_TEXT, "shard": "gradients", "accumulate": 2,
    },
    "densenet-short": {"model": "densenet-22", **IMAGES, "segments": 3, "short": True},
    "resnet-deferred": {
        "model": "resnet-20", **IMAGES, "batch_norm": "deferred", "accumulate": 2, "batch": 4,
    },
}  # fmt: skip
"""Settings of each run. With ``short`` the last batch is shorter; with ``overflows`` some gradients are inf in float16."""
OVERFLOWS_ONCE_IN = 9  # batches
FIRST_SCALE = 2.0**16  # of the loss, which each step that is skipped halves


def config_of(job: MeasuredJob, case: Case) -> Config:
    """The configuration of a run, whose snapshots are those of the middle and the end."""
    settings = dict(RUNS[case.workload])
    short = settings.pop("short", False)
    settings.pop("overflows", None)
    if "pixels" not in settings:
        settings["data"] = f"text:{job.folder / 'text.txt'}"
    folder = str(job.folder / case.workload)
    half = half_of(case)
    return Config(
        **settings,
        **({"epochs": 1} if short else {"steps": case.sizes["steps"]}),
        replicas=case.sizes["replicas"],
        seed=3,
        eval_every=half,
        eval_batches=1,
        log_every=2,
        snapshot_every=half,
        keep_snapshots=100,
        device="cpu",
        bucket_cap_mb=0.01,
        **({"resume": folder} if case.engine == "resumed" else {"output": folder}),
    )


def half_of(case: Case) -> int:
    """The step in the middle of a run."""
    return max(int(case.sizes["steps"]) // 2, 1)


class Overflowing:
    """An objective with a large loss for some batches, whoever computes them."""

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        loss: Tensor = self._objective.loss(output, batch)
        return loss * (1.0 if int(batch.targets.sum()) % OVERFLOWS_ONCE_IN else 1e6)


class FewSamples:
    """The first samples of a data set: so many steps, of which the last is short."""

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any, epoch: Any) -> Any:
        return self._data.batch(indices, epoch)


def train(job: MeasuredJob, case: Case) -> tuple[str, int]:
    """The hash of a run, and the number of steps that it skipped. Collective."""
    config = config_of(job, case)
    parts = assemble(config)
    data: Any = parts.train
    if config.epochs is not None:
        replicas, steps = case.sizes["replicas"], case.sizes["steps"]
        data = FewSamples(data, config.batch * replicas * (steps - 1) + replicas // 2 + 1)
    objective: Any = parts.objective
    if RUNS[case.workload].get("overflows"):
        objective = Overflowing(objective)
    trainer = Trainer(config, parts.model, objective, data, parts.test)
    trainer.run()
    digest = hashlib.sha256()
    optimizer = trainer.optimizer.full_state_dict(all_ranks=True)["state"]
    for tensor in tensors_of([trainer.model.state_dict(), optimizer]):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    scaler = trainer.precision.scaler
    scale = FIRST_SCALE if scaler is None else scaler.get_scale()
    records = logs.read(trainer.folder / "log.jsonl") if hc.rank() == 0 else None
    kept = [
        {name: value for name, value in record.items() if name not in NOT_BITS} for record in records or ()
    ]
    kept = hc.broadcast_object(kept, root_rank=0)
    digest.update(json.dumps([kept, scale], sort_keys=True).encode())
    return digest.hexdigest()[:12], round(math.log2(FIRST_SCALE / scale))


def copy_half(job: MeasuredJob, case: Case) -> None:
    """Copies the run of the job before, as it was in the middle; of the first job its own."""
    whole = sorted(job.folder.parent.glob("whole*"), key=lambda folder: folder.stat().st_mtime_ns)
    *_, before = whole[:-1] or whole
    shutil.copytree(before / case.workload, job.folder / case.workload)
    for snapshot in (job.folder / case.workload / "snapshots").iterdir():
        if not snapshot.name.endswith(f"-{half_of(case):08d}"):
            shutil.rmtree(snapshot)


def measure(job: MeasuredJob) -> list[Found]:
    """All runs of the job, on one rank: hashes, and losses where these are asked for."""
    return [_measured(job, case) for case in job.cases]


def _measured(job: MeasuredJob, case: Case) -> Found:
    if case.workload not in RUNS:
        losses = losses_of(case)
        return {"hash": hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:12], "losses": losses}
    hc.init()
    if hc.rank() == 0:
        (job.folder / "text.txt").write_bytes(TEXT)
        if case.engine == "resumed":
            copy_half(job, case)
    hc.barrier()
    digest, skipped = train(job, case)
    return {"hash": digest, "skipped": skipped}
