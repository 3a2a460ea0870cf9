"""One rank of a job: trains each workload with the job's engine and writes down how long every step took.

Run by the launcher as ``python -m hvd_ckpt.bench.worker JOB`` under ``horovodrun``, where JOB is the file that
describes the job.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_ckpt.bench.compare.engines import Engine, find_engine
from hvd_ckpt.bench.job import Answer, Job
from hvd_ckpt.bench.workloads import WORKLOADS, Workload
from hvd_ckpt.memory import recording_peak

__all__ = ["measure", "time_steps"]

LEARNING_RATE = 1e-3
STEPS_TO_SETTLE = 3  # after which every engine has made the buffers it keeps
COUNTS = 3


def time_steps(workload: Workload, engine: Engine, steps: int) -> list[float]:
    """Seconds of each of ``steps`` training steps, from ``zero_grad`` to ``step``, after the workload's warm-up."""
    model, optimizer = _wrapped(workload, engine)
    inputs = _inputs(workload, engine)
    seconds = []
    for _ in range(workload.warm_up + steps):
        start = time.perf_counter()
        _step(workload, model, optimizer, inputs)
        seconds.append(time.perf_counter() - start)
    return seconds[workload.warm_up :]


def gradient_bytes(workload: Workload, engine: Engine) -> int:
    """Bytes that PyTorch's allocator has handed out after a step, for anything but parameters, buffers and inputs.

    That is gradients and the engine's buckets. Not counted is what the communication threads allocate (Horovod's fusion
    buffer, Gloo's and MPI's own buffers). It is the least of several counts: a block that a communication thread gives back
    (as happens to the buckets that DDP replaces after its first step) is missed, so a count can be too high.
    """
    return min(_count_gradient_bytes(workload, engine) for _ in range(COUNTS))


def _count_gradient_bytes(workload: Workload, engine: Engine) -> int:
    inputs = _inputs(workload, engine)
    gc.collect()  # what an earlier count has left must not be given back within this one
    with recording_peak() as memory:
        model, optimizer = _wrapped(workload, engine)
        for _ in range(STEPS_TO_SETTLE):
            _step(workload, model, optimizer, inputs)
        gc.collect()
    state = [*model.parameters(), *model.buffers()]
    return memory.held_bytes - sum(tensor.numel() * tensor.element_size() for tensor in state)


def _wrapped(workload: Workload, engine: Engine) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1)
    model = workload.model()
    return engine.wrap(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))


def _inputs(workload: Workload, engine: Engine) -> torch.Tensor:
    return workload.inputs(torch.Generator().manual_seed(engine.rank))


def _step(workload: Workload, model: nn.Module, optimizer: Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    workload.loss(model, inputs).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def measure(job: Job, engine: Engine) -> Answer:
    """Everything that a job asks of one rank."""
    seconds: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    for name in job.workloads:
        workload = WORKLOADS[name]()
        seconds[name] = time_steps(workload, engine, job.steps or workload.steps)
        gc.collect()
        if job.memory:
            held[name] = gradient_bytes(workload, engine)
            gc.collect()
    return Answer(torch.get_num_threads(), seconds, held)


def main(job_file: str) -> None:
    """Join the job's other ranks, measure, leave."""
    job = Job.load(Path(job_file))
    try:
        engine = find_engine(job.engine)()
        engine.start(job.folder)
        if engine.size != job.size:
            raise RuntimeError(f"the job has {engine.size} ranks, {job.size} were asked for")
        gc.collect()
        gc.freeze()  # what the imports have left behind is no engine's business
        measure(job, engine).save(job.answer_file(engine.rank))
        engine.stop()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    main(sys.argv[1])
