"""Time what `hvd-ckpt train` adds to a step, beside a loop written by hand with the same calls.

Both train the same model on the same batches, in jobs that alternate, and come to the same weights bit for bit. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from benchmarks.case import Case, Found, MeasuredJob, Row
from benchmarks.suite import Axis, Suite

if TYPE_CHECKING:
    from torch import nn

    from hvd_ckpt.app.training.config import Config
    from hvd_ckpt.data.dataset import Dataset
    from hvd_ckpt.data.objectives import Objective

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
    import torch

    import hvd_ckpt as hc
    from hvd_ckpt.app.training.optim import Schedule, optimizer_of
    from hvd_ckpt.data.sampler import DistributedSampler, batches_of_rank

    assert config.steps is not None and config.clip is not None
    schedule = Schedule(config.schedule, config.lr, config.steps, config.warmup)
    if isinstance(model, torch.nn.Sequential):
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            if (step + 1) % config.log_every == 0:
                losses.append(mean.item())
            after_step()


def measured(job: MeasuredJob, case: Case) -> Found:
    """The seconds of the steps, each from the end of the one before to its own, and a hash of the weights.

    A step of the trainer spans also batches from its loader, counting, the schedule and the log.
    """
    import hvd_ckpt as hc
    from benchmarks.worker import frozen
    from hvd_ckpt.app.compare.training import fingerprint
    from hvd_ckpt.app.training.build import assemble
    from hvd_ckpt.app.training.config import Config
    from hvd_ckpt.app.training.trainer import Trainer

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


def same_weights(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether weights and buffers are, bit for bit, those of the other loop after the same steps, on every rank."""
    same = row.same(row.peer(rows, "by-hand"), "hash")
    return None if same is None else "yes" if all(same) else "no"


train = Suite(
    engines=("trainer", "by-hand"),
    workloads=("bert-mini", "gpt-tiny"),
    against={"of by-hand": "by-hand", "same weights": same_weights},
    axes={"accumulate": Axis("Micro-batches of a batch.", ("1", "2", "4"), "1,4")},
    sizes={name: {"batch": 4} for name in ("bert-mini", "gpt-tiny")},
    np="2",
    rounds=9,
    steps=40,
    quick={"rounds": 1, "steps": 4, "workloads": "gpt-tiny"},
    sound=lambda row, rows: same_weights(row, rows) != "no",
    measure=lambda job: [measured(job, case) for case in job.cases],
    notes=(
        "trainer: Trainer.run as it is, with its loader, schedule, micro-batches, report, log file and a log entry over all ranks "
        "every 10 steps; no evaluation.",
        "by-hand: the same calls, loader, data set and model: learning rate from the schedule, zero_grad, one sum of "
        "the number of terms over the ranks, forward pass, loss and backward pass of each micro-batch weighed by its terms, "
        "synchronize, clip_grad_norm_, step; loss.item() as often as the trainer logs. It writes and prints nothing.",
    ),
)
