"""The loop of ``hvd-ckpt train`` and one written by hand, which run in turn; both are engines of the suite ``train`` alone.

The trainer's is :meth:`Trainer.run` as it is; its step is only overridden to read the clock, and to let the other loop have its
turn. So a step of the trainer spans everything that it does between steps: batches from its loader, counting, the schedule, the
log.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc
from benchmarks.probes import hash_of
from benchmarks.worker import Job, frozen
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import HvdCkpt, variant
from hvd_ckpt.app.training.build import Assembly, assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.modes import Parts
from hvd_ckpt.app.training.optim import Schedule, build_optimizer
from hvd_ckpt.app.training.trainer import Trainer
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Batch, Objective
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated

AHEAD = 2  # batches prepared before they are needed, as many as the trainer's loader has
WARM_UP = 3  # steps: the reducer learns in the first, and its buckets are there after the second
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

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)


class Measured(Trainer):
    """The trainer, whose steps alternate with those of the loop by hand: T H, H T, T H, ...

    Both take ``WARM_UP`` steps, then ``rounds`` timed ones, then one more, before which the last one ends. Dropout draws from one
    random state for each loop, changed over between them.

    Args:
        config: its ``steps`` are ``WARM_UP + rounds + 1``.
        assembly: what is trained, by this trainer; the loop by hand has a copy of the model.
        rounds: how many.

    Attributes:
        by_hand: the other loop.
        seconds, seconds_by_hand: of each timed step, on this rank, after all ranks have met.
    """

    def __init__(self, config: Config, assembly: Assembly, rounds: int) -> None:
        twin = copy.deepcopy(assembly.model)
        super().__init__(config, assembly.model, assembly.objective, assembly.train)
        self.by_hand = ByHand(config, twin, assembly.objective, assembly.train)
        self.seconds: list[float] = []
        self.seconds_by_hand: list[float] = []
        self._rounds, self._start = rounds, 0.0
        self._other_random = torch.get_rng_state()

    def step(self, parts: Parts) -> list[Accumulated]:
        """The trainer's step, after the turn of the other loop where one is due."""
        done = self.progress.step - WARM_UP
        if 0 <= done <= self._rounds:
            self._end_round(done)
        return super().step(parts)

    def _end_round(self, done: int) -> None:
        """Ends the trainer's timed step, which spans all from one step to the next, and gives the other loop its turns."""
        # Turns of the trainer (T) and the loop by hand (H), and ``done`` at the calls, each of which comes after a turn of T:
        #
        #     T H | T H | H T | T H | H T      warm-up, then rounds 1 to 4
        #     0     1       2   3       4
        if done:
            self.seconds.append(time.perf_counter() - self._start)
        with self.report.meter.excluded():
            if done == 0:
                for _ in range(WARM_UP):
                    self._other_step()
            elif done % 2:
                self.seconds_by_hand.append(self._other_step())
                if done < self._rounds:
                    self.seconds_by_hand.append(self._other_step())
            if done == self._rounds:
                self._other_step()
        hc.barrier()
        self._start = time.perf_counter()

    def _other_step(self) -> float:
        """Seconds of a step by hand."""
        own = torch.get_rng_state()
        torch.set_rng_state(self._other_random)
        hc.barrier()
        start = time.perf_counter()
        self.by_hand.step()
        seconds = time.perf_counter() - start
        self._other_random = torch.get_rng_state()
        torch.set_rng_state(own)
        return seconds


def measure(job: Job) -> list[dict[str, Any]]:
    """For each case the seconds of its steps and a hash of its weights; both loops of a condition run together."""
    hc.init()
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for case in job.cases:
        condition = case.workload, case.at["accumulate"]
        if condition not in found:
            found[condition] = run_both(job, *condition, case.sizes["batch"])
    return [found[case.workload, case.at["accumulate"]][case.engine] for case in job.cases]


def run_both(job: Job, model: str, accumulate: int, batch: int) -> dict[str, dict[str, Any]]:
    """Both loops in turn."""
    config = Config(
        model=model,
        accumulate=accumulate,
        batch=batch,
        steps=WARM_UP + job.steps + 1,
        validation_split=0.0,
        clip=1.0,
        log_every=LOG_EVERY,
        device="cpu",
        output=str(job.folder / f"{model}-{accumulate}"),
    )
    trainer = Measured(config, assemble(config), job.steps)
    with frozen():
        trainer.run()
    trainer.by_hand.close()
    return {
        "trainer": {"seconds": trainer.seconds, "hash": _hash(trainer.model)},
        "by-hand": {"seconds": trainer.seconds_by_hand, "hash": _hash(trainer.by_hand.model)},
    }


def _hash(model: nn.Module) -> str:
    return hash_of(model.state_dict().values())


ENGINES: dict[str, type[Engine]] = {
    "trainer": variant(HvdCkpt, "hvd-ckpt train"),
    "by-hand": variant(HvdCkpt, "the same calls, by hand"),
}
