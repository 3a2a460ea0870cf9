"""Steps of `hvd-ckpt train`, and of a loop written by hand with the same calls."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import nn

import hvd_ckpt as hc
from benchmarks.case import Case, Found, MeasuredJob
from benchmarks.suites.train import train
from benchmarks.worker import frozen
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.optim import Schedule, optimizer_of
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler, batches_of_rank

LOG_EVERY = 10  # steps


def by_hand(
    config: Config, model: nn.Module, objective: Objective, data: Dataset, after_step: Callable[[], None]
) -> None:
    """The loop that an engineer writes for one model, with this library's calls and nothing of the trainer. It writes nothing.

    A step sets the learning rate, clears the gradients, sums the number of terms over the ranks, runs each micro-batch forward and
    backward with its share of the terms, reduces, clips, and steps. Every ``log_every`` steps it reads the loss.

    Args:
        config: the settings that this loop knows: batch, accumulate, seed, lr, schedule, clip, optimizer, log_every, steps.
        model: trained in place.
    """
    assert config.steps is not None and config.clip is not None
    schedule = Schedule(config.schedule, config.lr, config.steps, config.warmup)
    if isinstance(model, nn.Sequential):
        hc.seed_blocks(model)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hc.DistributedOptimizer(
        optimizer_of(config, model), named_parameters=model.named_parameters()
    )
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    sampler = DistributedSampler(data, seed=config.seed)
    with closing(batches_of_rank(data, sampler, config.batch, hc.rank(), hc.size())) as loader:
        for step, (((batch, _),), _) in zip(range(config.steps), loader):
            parts = batch.split(config.accumulate)
            terms = [objective.weight(part) for part in parts]
            total = torch.tensor([sum(terms)], dtype=torch.float64)
            if hc.size() > 1:
                total = hc.allreduce(total, op=hc.Sum, name="by_hand.terms")
            # Gradients are averaged over the ranks, so each rank scales its own by their number: the sum over all terms remains.
            factor = hc.size() / total.item()
            schedule.apply(optimizer, step)
            optimizer.zero_grad()
            mean = torch.zeros(())
            for part, own in zip(parts, terms):
                loss = objective.loss(model(*part.inputs, **part.shared), part)
                mean += loss.detach() * (own / sum(terms))
                (loss * (own * factor)).backward()  # type: ignore[no-untyped-call]
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            if (step + 1) % config.log_every == 0:
                losses.append(mean.item())
            after_step()


def measure(job: MeasuredJob, case: Case) -> Found:
    """The seconds of the steps, each from the end of the one before to its own, and a hash of the weights.

    A step of the trainer spans also batches from its loader, counting, the schedule and the log.
    """
    hc.init()
    config = Config(
        model=case.workload,
        accumulate=int(case.at["accumulate"]),
        batch=case.sizes["batch"],
        steps=train.warm_up + job.steps + 2,  # the trainer tells of the end of all but the last
        validation_split=0.0,
        clip=1.0,
        log_every=LOG_EVERY,
        device="cpu",
        output=str(job.folder / f"{case.workload}-{case.at['accumulate']}"),
    )
    model, objective, data, _ = assemble(config)
    ends: list[float] = []
    run = (
        Trainer(config, model, objective, data).run
        if case.engine == "trainer"
        else functools.partial(by_hand, config, model, objective, data)
    )
    with frozen():
        run(lambda: ends.append(time.perf_counter()))
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    found = {"hash": fingerprint(model.state_dict().items())}
    return {"seconds": seconds[train.warm_up :][: job.steps], **found}
