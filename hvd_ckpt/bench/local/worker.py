"""One rank of a job: trains a GPT on text by each method, and evaluates the mean of the ranks' weights now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.evaluation import EvaluationOptions, evaluate
from hvd_ckpt.app.training.optim import Schedule, build_optimizer
from hvd_ckpt.bench.harness.jobs import join_torch, run_rank
from hvd_ckpt.bench.local.command import METHODS, LocalJob, Method, MethodResult
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler

WARM_UP = 3  # steps that are not timed
EVALUATED = 512  # samples, the same ones each time
EVALUATION_BATCH = 32
TORCHFT_TIMEOUT = timedelta(seconds=120)
_kept: list[Any] = []  # of torchft, which must outlive a method


def measure(job: LocalJob) -> dict[str, MethodResult]:
    """One rank's part of a job: what it finds out about each method."""
    hc.init()
    return {name: _train(job, METHODS[name]) for name in job.methods}


def _train(job: LocalJob, method: Method) -> MethodResult:
    options = {"width": job.width, "layers": job.layers}
    config = Config(
        "gpt-tiny", model_options=options, text=job.text, sequence_length=job.length, seed=job.seed
    )
    model, objective, train, test = hc.assemble(config)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, average = _optimizer(method, job, model)
    sampler = DistributedSampler(train, seed=job.seed)
    schedule = Schedule("cosine", job.lr, job.steps, job.steps // 20)
    count = job.batch * hc.size()
    result = MethodResult(count * job.length)
    wanted = {job.steps * (number + 1) // job.evaluations for number in range(job.evaluations)}
    warm_up = min(WARM_UP, job.steps - 1)
    start = 0.0

    def look(step: int) -> None:
        if test is not None:
            result.points.append(step)
            result.losses.append(_loss_of_mean(model, test, objective))

    if wanted:
        look(0)
    for step in range(job.steps):
        if step == warm_up:
            hc.barrier()
            start, result.timed = time.perf_counter(), job.steps - step
        batch = train.batch(*sampler.part(step * count, count, hc.rank(), hc.size()))
        schedule.apply(optimizer, step)
        optimizer.zero_grad()
        objective.loss(model(*batch.inputs, **batch.shared), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average()
        if step + 1 in wanted:
            hc.barrier()
            if step >= warm_up:
                result.seconds += time.perf_counter() - start
            look(step + 1)
            hc.barrier()
            start = time.perf_counter()
    hc.barrier()
    result.seconds += time.perf_counter() - start
    result.sent = _sent(method, job, model, optimizer)
    return result


def _no_average() -> None:
    """What is called after each step where the optimizer itself averages or reduces."""


def _optimizer(method: Method, job: LocalJob, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    """An optimizer, and what is called after each step."""
    bare = build_optimizer("adamw", model, job.lr, 0.01, {})
    named = model.named_parameters()
    if method.of == "torch":
        return bare, _torch_averager(model, method.every, job.folder)
    if method.of == "torchft":
        _add_torchft_diloco(model, bare, method.every, job.outer_lr, job.outer_momentum)
        return bare, _no_average
    if not method.every:
        return hc.DistributedOptimizer(bare, named_parameters=named), _no_average
    outer = hc.Nesterov(job.outer_lr, job.outer_momentum) if method.outer else None
    ours = hc.LocalSGD(
        bare, named, method.every, outer, fragments=method.fragments, delay=method.delay, wire=method.wire
    )
    return ours, _no_average


def _torch_averager(model: nn.Module, every: int, folder: Path) -> Callable[[], None]:
    """PyTorch's averages of parameters, over Gloo; the result is to be called after each step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    if not torch.distributed.is_initialized():
        join_torch(folder, hc.rank(), hc.size())
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    return lambda: averager.average_parameters(model.parameters())


def _add_torchft_diloco(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, lr: float, momentum: float
) -> None:
    """Has torchft's hooks average the model after each ``every`` steps of the optimizer; each rank is a replica group."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    port = None
    if hc.rank() == 0:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=hc.size())
        _kept.append(server)
        port = server.address().rpartition(":")[2]
    port = hc.broadcast_object(port, root_rank=0)
    distributed: Any = torch.distributed  # whose stores have no types
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=hc.size(),
        use_async_quorum=False,
        timeout=TORCHFT_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"rank{hc.rank()}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    diloco = DiLoCo(manager, [model], optimizer, outer, every, pin_memory=False)
    diloco.__enter__()
    _kept.extend([store, manager, diloco])


def _sent(method: Method, job: LocalJob, model: nn.Module, optimizer: Any) -> int:
    """Counted by local SGD itself; of an allreduce the 2 (n - 1) / n of its bytes that a ring sends."""
    if method.every and method.of is None:
        return sum(optimizer.traffic.sent.values())
    size = sum(one.nbytes for one in model.parameters())
    times = job.steps // method.every if method.every else job.steps
    return int(times * size * 2 * (hc.size() - 1) / hc.size())


def _loss_of_mean(model: nn.Module, test: Dataset, objective: Objective) -> float:
    with _mean_of_ranks(model):
        found = evaluate(
            model,
            test,
            objective,
            EvaluationOptions(
                batch=EVALUATION_BATCH,
                batches=EVALUATED // (EVALUATION_BATCH * hc.size()),
                device=torch.device("cpu"),
            ),
        )
    return found["loss"]


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
