"""Trains architectures on the ranks of a job with sharded parameters, and compares with the run that is not sharded."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from checks import Architecture, draw as draw_architecture, told
from modes import STEPS, Outcome, classify, compare, loss_of, random_state, seed
from subjects import Untrainable, subject_of
from torch import Tensor

import hvd_ckpt as hc

MODE = "stage 3"


def draw(seed: int | str, ranks: int, tensor: int) -> Architecture:
    """The architecture of a number or a name."""
    return draw_architecture(seed, ranks, tensor)._replace(modes=(MODE,))


def check(case: Architecture) -> Iterator[str]:
    """What is not right, after a row of the table. Collective."""

    def rows() -> Iterator[dict[str, Any]]:
        began = time.monotonic()
        outcome, detail = outcome_of(case.name)
        seconds = round(time.monotonic() - began, 1)
        yield {"mode": MODE, "outcome": outcome, "detail": detail, "seconds": seconds}

    return told(case.name, (MODE,), rows())


def outcome_of(name: str) -> tuple[str, str]:
    """``equal``, ``rounding``, ... of an architecture on these ranks, and the detail; the same on every rank. Collective."""
    try:
        subject = subject_of(name)
        mine: tuple[str, str] = ("", "")
    except Exception as error:
        mine = ("untrainable", str(error) if isinstance(error, Untrainable) else repr(error))
    results = hc.allgather_object(mine)
    if any(outcome for outcome, _ in results):
        return next(result for result in results if result[0])
    try:
        kept = train(subject, "none")
        sharded = train(subject, "parameters")
        mine = compare(sharded, kept)
    except Exception as error:
        traceback.print_exc()  # the other ranks may wait for this one
        mine = classify(error)
    results = hc.allgather_object(mine)
    order = ("error", "wrong", "memory", "refused", "rounding", "equal")
    return min(results, key=lambda result: order.index(result[0]))


def train(subject: Any, shard: str) -> Any:
    """Trains for a few steps, each rank with its own random numbers and order of the batch."""

    def sample() -> dict[str, Any]:
        values = subject.sample()
        return {
            name: value.flip(0) if isinstance(value, Tensor) and value.dim() and hc.rank() % 2 else value
            for name, value in values.items()
        }

    seed(1)
    model = subject.make().train()
    with torch.no_grad():
        model(**subject.sample())  # the same on all ranks, since a sharded optimizer broadcasts buffers
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hc.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), shard=shard, model=model
    )
    seed(2 + hc.rank())
    values: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(**sample()))
        loss.backward()
        optimizer.step()
        values[f"loss {step}"] = loss.detach().clone()
        with optimizer.gathered_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        values.update({f"weight {step} of {name}": weight for name, weight in weights.items()})
    values.update({f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()})
    values.update(random_state())
    return Outcome(values)
