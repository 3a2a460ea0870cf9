"""The worker of the suite ``train``: the loop of ``hvd-ckpt train``, and one written by hand.

A step spans everything from its beginning to that of the next one: of the trainer, also batches from its loader, counting, the
schedule and the log.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

import hvd_ckpt as hc
from benchmarks.case import Case
from benchmarks.worker import Found, MeasuredJob, frozen
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.modes import Parts
from hvd_ckpt.app.training.optim import Schedule, build_optimizer
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Batch, Objective
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated

AHEAD = 2  # batches prepared before they are needed, as many as the trainer's loader has
LOG_EVERY = 10  # steps


class ByHand:
    """The loop that an engineer writes for one model, with this library's calls and nothing of the trainer.

    Batches are drawn from the data set in the stream's order, two ahead in one thread. A step sets the learning rate, clears
    the gradients, sums the number of terms over the ranks, runs each micro-batch forward and backward with its share of the
    terms, reduces, clips, and steps. Every ``log_every`` steps it reads the loss. It writes nothing.

    Args:
        config: the settings that this loop knows: batch, accumulate, seed, lr, schedule, clip, optimizer, log_every, steps.
        model: trained in place.
        objective: its loss and terms.
        data: samples to train on.
    """

    def __init__(self, config: Config, model: nn.Module, objective: Objective, data: Dataset) -> None:
        assert config.steps is not None and config.clip is not None
        self.config, self.model, self.objective, self.data = config, model, objective, data
        self.clip = config.clip
        self.stream = DistributedSampler(data, seed=config.seed)
        self.schedule = Schedule(config.schedule, config.lr, config.steps, config.warmup)
        if isinstance(model, nn.Sequential):
            hc.seed_blocks(model)
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = build_optimizer(
            config.optimizer, model, config.lr, config.weight_decay, config.optimizer_options
        )
        self.optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hc.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.taken = self.drawn = 0
        self.losses: list[float] = []
        self.begun: list[float] = []
        self._thread = ThreadPoolExecutor(1)
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(AHEAD):
            self._draw()

    def _draw(self) -> None:
        count = self.config.batch * hc.size()
        indices, epochs = self.stream.part(self.drawn * count, count, hc.rank(), hc.size())
        self._ahead.append(self._thread.submit(self.data.batch, indices, epochs))
        self.drawn += 1

    def step(self) -> None:
        """One step of the optimizer."""
        batch = self._ahead.popleft().result()
        self._draw()
        parts = batch.split(self.config.accumulate)
        terms = [self.objective.weight(part) for part in parts]
        total = torch.tensor([sum(terms)], dtype=torch.float64)
        if hc.size() > 1:
            total = hc.allreduce(total, op=hc.Sum, name="by_hand.terms")
        # Gradients are averaged over the ranks, so each rank scales its own by their number: the sum over all terms remains.
        factor = hc.size() / total.item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.taken)
        self.optimizer.zero_grad()
        mean = torch.zeros(())
        for part, own in zip(parts, terms):
            loss = self.objective.loss(self.model(*part.inputs, **part.shared), part)
            mean += loss.detach() * (own / sum(terms))
            (loss * (own * factor)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.taken += 1
        if self.taken % self.config.log_every == 0:
            self.losses.append(mean.item())

    def run(self) -> None:
        """All steps."""
        for _ in range(self.taken, self.config.steps or 0):
            self.begun.append(time.perf_counter())
            self.step()
        self._thread.shutdown(cancel_futures=True)


class Measured(Trainer):
    """The trainer as it is, whose steps note when they begin.

    Attributes:
        begun: the time at the beginning of each step.
    """

    begun: tuple[float, ...] = ()

    def step(self, parts: Parts) -> list[Accumulated]:
        self.begun = (*self.begun, time.perf_counter())
        return super().step(parts)


def measure(job: MeasuredJob) -> list[Found]:
    """For each case the seconds of its steps and a hash of its weights."""
    hc.init()
    return [_measured(job, case) for case in job.cases]


def _measured(job: MeasuredJob, case: Case) -> Found:
    config = Config(
        model=case.workload,
        accumulate=case.at["accumulate"],
        batch=case.sizes["batch"],
        steps=job.warm_up + job.steps + 1,  # the last one ends the one before
        validation_split=0.0,
        clip=1.0,
        log_every=LOG_EVERY,
        device="cpu",
        output=str(job.folder / f"{case.workload}-{case.at['accumulate']}"),
    )
    model, objective, data, _ = assemble(config)
    kind = Measured if case.engine == "trainer" else ByHand
    loop = kind(config, model, objective, data)
    with frozen():
        loop.run()
    seconds = [later - begun for begun, later in itertools.pairwise(loop.begun)]
    return {"seconds": seconds[job.warm_up :], "hash": fingerprint(model.state_dict().items())}
