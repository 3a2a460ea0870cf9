"""Tests of several optimizers of the same parameters: the one that was made last has them, and an earlier one raises."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    chain,
    difference,
    loss,
    loss_of_all,
    same_everywhere,
    sgd,
    train_for_all,
    wrap as wrapped,
)
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (0, 1, 2)  # another optimizer for a model of stage 3 needs unshard()


def wrap(model: nn.Module, stage: int = 0, bare: Any = None, **options: Any) -> Any:
    return wrapped(model, bare, shard=stage, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[int]:
    launches = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        launches.append(optimizer.reduction_stats.last.launches_in_backward)
    return launches


@pytest.mark.parametrize("stage", STAGES)
def test_a_replaced_optimizer_costs_no_overlap_and_is_not_clipped(stage: int) -> None:
    model, reference = chain(3), chain(3)
    optimizer = wrap(model, stage)
    expected = train(model, optimizer, range(4))
    assert expected[-1] > 0
    kept = [optimizer] if hc.rank() != 1 else []  # Python has not collected it on all ranks
    optimizer = wrap(model, stage, op=hc.Sum)
    gc.collect()
    reference.load_state_dict(model.state_dict())
    bare = sgd(reference)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        norm = hc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert optimizer.reduction_stats.last.launches_in_backward == expected[step]
        bare.zero_grad()
        loss_of_all(reference, step, hc.Sum).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        bare.step()
    assert difference(model, reference) < 1e-6
    del kept


CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "step(closure)": lambda optimizer: optimizer.step(lambda: 0.0),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "reduce_for_caller": lambda optimizer: optimizer.reduce_for_caller(),
}


def refuses(optimizer: Any, name: str) -> None:
    """Every call that would reduce or step raises an error that names the parameter."""
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match=f"parameter '{name}' belongs to the DistributedOptimizer"):
            call(optimizer)
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match=f"parameter '{name}' belongs"):
        optimizer.step()


@pytest.mark.parametrize("op", [hc.Average, hc.Sum])
@pytest.mark.parametrize("stages", [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 2), (0, 3)])
def test_an_earlier_optimizer_of_the_parameters_raises(stages: tuple[int, int], op: Any) -> None:
    """At any moment, and the last one goes on as if it were alone."""
    model, reference = chain(3), chain(3)
    older = wrap(model, stages[0], op=op)
    train(model, older, range(1))
    newer = wrap(model, stages[1], op=op)
    with newer.gathered_parameters():
        reference.load_state_dict(copy.deepcopy(model.state_dict()))
    bare = sgd(reference)
    for step in range(4):
        newer.zero_grad()
        refuses(older, r"\d.0.(weight|bias)")
        loss(model, step).backward()
        refuses(older, r"\d.0.(weight|bias)")
        newer.step()
        bare.zero_grad()
        loss_of_all(reference, step, op).backward()
        bare.step()
    with newer.gathered_parameters():
        assert difference(model, reference) < 1e-6
        same_everywhere(model)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_sum_that_an_earlier_optimizer_has_left_is_not_added_up_again(stage: int) -> None:
    model = chain(3)
    older = wrap(model, stage, op=hc.Sum)
    train(model, older, range(1))
    newer = wrap(model, stage, op=hc.Sum)
    with pytest.raises(RuntimeError, match="is a sum over the ranks already"):
        newer.step()
    train(model, newer, range(2))
    same_everywhere(model)
    del older


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_has_lost_one_parameter_raises(stage: int) -> None:
    """Two losses with a trunk of both: the optimizer that was made last has the trunk."""
    model, reference = chain(3), chain(3)
    older = wrap(model, stage, torch.optim.SGD(model[:2].parameters(), lr=0.1))
    newer = wrap(model, stage, torch.optim.SGD(model[1:].parameters(), lr=0.1))
    bare = torch.optim.SGD(reference[1:].parameters(), lr=0.1)
    for step in range(4):
        refuses(older, r"1.0.(weight|bias)")
        train(model, newer, range(step, step + 1))
        train_for_all(reference, bare, range(step, step + 1))
    assert difference(model, reference) < 1e-6


def test_an_optimizer_that_has_died_keeps_its_parameters() -> None:
    """On some ranks, since Python collects it when it likes: the ranks could not agree on another owner."""
    model = chain(3)
    older = wrap(model)
    train(model, older, range(2))
    newer = wrap(model)
    train(model, newer, range(2))
    cycle = [newer] if hc.rank() else []
    cycle.append(cycle)
    del newer, cycle
    refuses(older, r"\d.0.(weight|bias)")
    last = wrap(model)
    gc.collect()
    assert train(model, last, range(4))[-1] > 0
    same_everywhere(model)


def test_gradients_of_an_older_optimizer_are_dropped() -> None:
    model = chain(3)
    older = wrap(model)
    train(model, older, range(2))
    older.zero_grad()
    loss(model, 2).backward()
    newer = wrap(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = copy.deepcopy(model)
    train(model, newer, range(3, 4))
    train_for_all(reference, sgd(reference), range(3, 4))
    assert difference(model, reference) < 1e-6


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_group_added_between_backward_and_step_keeps_all_gradients(stage: int) -> None:
    model, reference = chain(3), chain(3)
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    bare = torch.optim.SGD(rest, lr=0.1)
    optimizer = wrap(model, stage, bare)
    theirs = torch.optim.SGD(reference[1:].parameters(), lr=0.1)
    for step in range(4):
        for one in (optimizer, theirs):
            one.zero_grad()
        for parameter in [*first, *reference[0].parameters()] if step < 3 else ():
            parameter.grad = None
        loss(model, step).backward()
        loss_of_all(reference, step).backward()
        if step == 2:
            optimizer.add_param_group({"params": first})
            theirs.add_param_group({"params": list(reference[0].parameters())})
        optimizer.step()
        theirs.step()
    with optimizer.gathered_parameters():
        assert difference(model, reference) < 1e-6
