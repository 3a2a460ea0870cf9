"""One rank of a job: trains a GPT on text by one method, and evaluates the mean of the ranks' weights now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.bench.harness.jobs import run_rank
from hvd_ckpt.bench.local.job import METHODS, LocalJob, Method, RankResult
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.evaluation import evaluate
from hvd_ckpt.training.optim import Schedule, build_optimizer

WARM_UP = 3  # steps that are not timed
EVALUATED = 1024  # samples, the same ones each time
EVALUATION_BATCH = 32


def measure(job: LocalJob) -> RankResult:
    """One rank's part of a job."""
    hc.init()
    method = METHODS[job.method]
    options = {"width": job.width, "layers": job.layers}
    config = Config(
        "gpt-tiny", model_options=options, text=job.text, sequence_length=job.length, seed=job.seed
    )
    model, objective, train, test = hc.assemble(config)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, average = _optimizer(method, job, model)
    sampler, schedule = (
        DistributedSampler(train, seed=job.seed),
        Schedule("cosine", job.lr, job.steps, job.steps // 20),
    )
    count = job.batch * hc.size()
    result = RankResult(torch.get_num_threads(), count * job.length)
    wanted = {job.steps * (number + 1) // job.evaluations for number in range(job.evaluations)}
    warm_up = min(WARM_UP, job.steps - 1)
    start = 0.0
    for step in range(job.steps):
        if step == warm_up:
            hc.barrier()
            start, result.timed = time.perf_counter(), job.steps - step
        batch = train.batch(*sampler.part(step * count, count, hc.rank(), hc.size()))
        schedule.apply(optimizer, step)
        optimizer.zero_grad()
        loss = objective.loss(model(*batch.inputs, **batch.shared), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average()
        if step + 1 in wanted and test is not None:
            hc.barrier()
            if step >= warm_up:
                result.seconds += time.perf_counter() - start
            with _mean_of_ranks(model):
                found = evaluate(
                    model,
                    test,
                    objective,
                    batch=EVALUATION_BATCH,
                    batches=EVALUATED // (EVALUATION_BATCH * hc.size()),
                    device=torch.device("cpu"),
                    autocast=contextlib.nullcontext,
                )
            result.points.append(step + 1)
            result.losses.append(found["loss"])
            hc.barrier()
            start = time.perf_counter()
    hc.barrier()
    result.seconds += time.perf_counter() - start
    result.loss = float(loss)
    result.sent = _sent(method, job, model, optimizer)
    return result


def _optimizer(method: Method, job: LocalJob, model: nn.Module) -> tuple[Any, Any]:
    """An optimizer, and what is called after each step."""
    bare = build_optimizer("adamw", model, job.lr, 0.01, {})
    named = model.named_parameters()
    if method.torch:
        return bare, _torch_averager(model, method.every, job.folder / "rendezvous")
    if not method.every:
        return hc.DistributedOptimizer(bare, named_parameters=named), _nothing
    outer = hc.Nesterov(job.outer_lr, job.outer_momentum) if method.outer else None
    ours = hc.LocalSGD(
        bare, named, method.every, outer, fragments=method.fragments, delay=method.delay, wire=method.wire
    )
    return ours, _nothing


def _torch_averager(model: nn.Module, every: int, rendezvous: Path) -> Any:
    """PyTorch's averages of parameters, over a group that the ranks of this machine form."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=hc.rank(), world_size=hc.size()
    )
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    return lambda: averager.average_parameters(model.parameters())


def _nothing() -> None:
    pass


def _sent(method: Method, job: LocalJob, model: nn.Module, optimizer: Any) -> int:
    """Counted by local SGD itself; of an allreduce the 2 (n - 1) / n of its bytes that a ring sends."""
    if method.every and not method.torch:
        return sum(optimizer.traffic.sent.values())
    size = sum(one.nbytes for one in model.parameters())
    times = job.steps // method.every if method.every else job.steps
    return int(times * size * 2 * (hc.size() - 1) / hc.size())


@contextlib.contextmanager
def _mean_of_ranks(model: nn.Module) -> Iterator[None]:
    """The model has the mean of the ranks' weights; afterwards its own."""
    parameters = list(model.parameters())
    kept = [one.detach().clone() for one in parameters]
    with torch.no_grad():
        for one, mean in zip(parameters, hc.grouped_allreduce(kept, op=hc.Average, name="bench.local.mean")):
            one.copy_(mean)
        yield
        for one, own in zip(parameters, kept):
            one.copy_(own)


if __name__ == "__main__":
    run_rank(LocalJob, measure)
