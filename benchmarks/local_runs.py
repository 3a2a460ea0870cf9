"""One rank of a job: trains a GPT on text by each method, and evaluates the mean of the ranks' weights now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc
from benchmarks.engines.averaging import ModelAverager, TorchftDiLoCo
from benchmarks.suites.local import BATCH, FULL, LR, METHODS, QUICK, Figures, LocalJob, Method
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import HvdCkpt, Local
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.evaluation import EvaluationOptions, evaluate
from hvd_ckpt.app.training.optim import Schedule, build_optimizer
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler

WARM_UP = 3  # steps that are not timed
SAMPLES = 512  # samples, the same ones each time
EVALUATION_BATCH = 32
ENGINES: dict[str, type[Engine]] = {
    "hvd_ckpt": HvdCkpt,
    "local": Local,
    "torch": ModelAverager,
    "torchft": TorchftDiLoCo,
}


def measure(job: LocalJob) -> dict[str, Figures]:
    """The measurements of one rank, by method."""
    hc.init()
    return {name: _train(job, METHODS[name]) for name in job.methods}


def _train(job: LocalJob, method: Method) -> Figures:
    sizes = QUICK if job.settings.quick else FULL
    options = {"width": sizes["width"], "layers": sizes["layers"]}
    length = sizes["length"]
    text = job.settings.text
    config = Config("gpt-tiny", model_options=options, text=text, sequence_length=length, seed=job.seed)
    model, objective, train, test = hc.assemble(config)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    engine = _engine(method, job)
    optimizer: Any = engine.wrap(model, build_optimizer("adamw", model, LR, 0.01, {}))[1]
    sampler = DistributedSampler(train, seed=job.seed)
    schedule = Schedule("cosine", LR, job.steps, job.steps // 20)
    count = BATCH * hc.size()
    points: list[int] = []
    losses: list[float] = []
    evaluated = {job.steps * (number + 1) // job.evaluations for number in range(job.evaluations)}
    # At least one step is timed.
    warm_up = min(WARM_UP, job.steps - 1)
    start = seconds = 0.0

    def evaluate_mean(step: int) -> None:
        if test is not None:
            points.append(step * count * length)
            losses.append(_loss_of_mean(model, test, objective))

    if evaluated:
        evaluate_mean(0)
    for step in range(job.steps):
        if step == warm_up:
            hc.barrier()
            start = time.perf_counter()
        batch = train.batch(*sampler.part(step * count, count, hc.rank(), hc.size()))
        schedule.apply(optimizer, step)
        optimizer.zero_grad()
        objective.loss(model(*batch.inputs, **batch.shared), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step + 1 in evaluated:
            # The clock stops from one barrier to the next: an evaluation takes no time of the method.
            hc.barrier()
            if step >= warm_up:
                seconds += time.perf_counter() - start
            evaluate_mean(step + 1)
            hc.barrier()
            start = time.perf_counter()
    hc.barrier()
    seconds += time.perf_counter() - start
    counted = engine.sent(optimizer)
    return {
        "losses": losses,
        "points": points,
        "rate": count * length * (job.steps - warm_up) / seconds,
        "sent": (_sent(method, job.steps, model) if counted is None else counted) / job.steps,
    }


def _engine(method: Method, job: LocalJob) -> Engine:
    """The engine of a method, which has joined the other ranks."""
    options, settings = dict(method.options), job.settings
    if method.engine == "torchft":
        options |= {"lr": settings.outer_lr, "momentum": settings.outer_momentum}
    elif method.outer:
        options["outer"] = hc.Nesterov(settings.outer_lr, settings.outer_momentum)
    engine = ENGINES[method.engine](**options)
    engine.start(job.folder)
    return engine


def _sent(method: Method, steps: int, model: nn.Module) -> int:
    """Bytes of allreduces: of each the 2 (n - 1) / n of its bytes that a ring sends."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    times = steps // method.options.get("every", 1)
    return int(times * size * 2 * (hc.size() - 1) / hc.size())


def _loss_of_mean(model: nn.Module, test: Dataset, objective: Objective) -> float:
    with _mean_of_ranks(model):
        evaluation = evaluate(
            model,
            test,
            objective,
            EvaluationOptions(
                batch=EVALUATION_BATCH,
                batches=SAMPLES // (EVALUATION_BATCH * hc.size()),
                device=torch.device("cpu"),
            ),
        )
    return evaluation["loss"]


@contextlib.contextmanager
def _mean_of_ranks(model: nn.Module) -> Iterator[None]:
    """The model has the mean of the ranks' weights; afterwards its own."""
    parameters = list(model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        means = hc.grouped_allreduce(kept, op=hc.Average, name="bench.local.mean")
        for parameter, mean in zip(parameters, means):
            parameter.copy_(mean)
        yield
        for parameter, own in zip(parameters, kept):
            parameter.copy_(own)
