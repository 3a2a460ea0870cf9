"""Tests of several optimizers of the same parameters: the one that was made last has them, and an earlier one raises."""

from __future__ import annotations

import copy
import gc
from operator import methodcaller
from typing import Any

import pytest
import torch
from one_process import (
    chain,
    check_weights,
    loss,
    loss_of_all,
    same_everywhere,
    sgd,
    train,
    train_for_all,
    trained,
    wrap,
)
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (0, 1, 2)  # another optimizer for a model of stage 3 needs unshard()
CALLS = (
    methodcaller("step"),
    methodcaller("step", lambda: 0.0),
    methodcaller("synchronize"),
    methodcaller("reduce_for_caller"),
)


def refuses(optimizer: Any, name: str) -> None:
    """Every call that would reduce or step raises an error that names the parameter."""
    belongs = f"parameter '{name}' belongs to the DistributedOptimizer"
    for call in CALLS:
        with pytest.raises(RuntimeError, match=belongs):
            call(optimizer)
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match=belongs):
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_replaced_optimizer_costs_no_overlap_and_is_not_clipped(stage: int) -> None:
    reference = chain(3)
    model, replaced = trained(chain(3), steps=4, shard=stage)
    launches = replaced.reduction_stats.launches_in_backward
    assert launches > 0
    kept = [replaced] if hc.rank() != 1 else []  # Python has not collected it on all ranks
    del replaced
    optimizer = wrap(model, shard=stage, op=hc.Sum)
    gc.collect()
    reference.load_state_dict(model.state_dict())
    bare = sgd(reference)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        norm = hc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        bare.zero_grad()
        loss_of_all(reference, step, hc.Sum).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        bare.step()
    assert optimizer.reduction_stats.launches_in_backward == launches
    check_weights(model, reference)
    del kept


@pytest.mark.parametrize("op", [hc.Average, hc.Sum])
@pytest.mark.parametrize("stages", [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 2), (0, 3)])
def test_an_earlier_optimizer_of_the_parameters_raises(stages: tuple[int, int], op: Any) -> None:
    """At any moment, and the last one goes on as if it were alone."""
    reference = chain(3)
    model, older = trained(chain(3), shard=stages[0], op=op)
    newer = wrap(model, shard=stages[1], op=op)
    with newer.gathered_parameters():
        reference.load_state_dict(model.state_dict())
    for step in range(4):
        newer.zero_grad()
        refuses(older, r"\d.0.(weight|bias)")
        loss(model, step).backward()
        refuses(older, r"\d.0.(weight|bias)")
        newer.step()
    train_for_all(reference, sgd(reference), range(4), op)
    check_weights(model, reference, newer)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_sum_that_an_earlier_optimizer_has_left_is_not_added_up_again(stage: int) -> None:
    model, older = trained(chain(3), shard=stage, op=hc.Sum)
    newer = wrap(model, shard=stage, op=hc.Sum)
    with pytest.raises(RuntimeError, match="is a sum over the ranks already"):
        newer.step()
    train(model, newer, range(2))
    same_everywhere(model)
    del older


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_has_lost_one_parameter_raises(stage: int) -> None:
    """Two losses with a trunk of both: the optimizer that was made last has the trunk."""
    model, reference = chain(3), chain(3)
    older = wrap(model, sgd(model[:2]), shard=stage)
    newer = wrap(model, sgd(model[1:]), shard=stage)
    for step in range(4):
        refuses(older, r"1.0.(weight|bias)")
        train(model, newer, range(step, step + 1))
    train_for_all(reference, sgd(reference[1:]), range(4))
    check_weights(model, reference)


def test_an_optimizer_that_has_died_keeps_its_parameters() -> None:
    """On some ranks, since Python collects it when it likes: the ranks could not agree on another owner."""
    model, older = trained(chain(3))
    _, newer = trained(model)
    cycle = [newer] if hc.rank() else []
    cycle.append(cycle)
    del newer, cycle
    refuses(older, r"\d.0.(weight|bias)")
    last = wrap(model)
    gc.collect()
    train(model, last, range(4))
    assert last.reduction_stats.last.launches_in_backward > 0
    same_everywhere(model)


def test_gradients_of_an_older_optimizer_are_dropped() -> None:
    model, older = trained(chain(3))
    older.zero_grad()
    loss(model, 2).backward()
    newer = wrap(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = copy.deepcopy(model)
    train(model, newer, range(3, 4))
    train_for_all(reference, sgd(reference), range(3, 4))
    check_weights(model, reference)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_group_added_between_backward_and_step_keeps_all_gradients(stage: int) -> None:
    model, reference = chain(3), chain(3)
    first = list(model[0].parameters())
    optimizer, bare = wrap(model, sgd(model[1:]), shard=stage), sgd(reference[1:])
    train(model, optimizer, range(2))
    train_for_all(reference, bare, range(2))
    optimizer.zero_grad()
    for parameter in first:
        parameter.grad = None
    loss(model, 2).backward()
    optimizer.add_param_group({"params": first})
    optimizer.step()
    train(model, optimizer, range(3, 4))
    bare.add_param_group({"params": list(reference[0].parameters())})
    train_for_all(reference, bare, range(2, 4))
    check_weights(model, reference, optimizer)
