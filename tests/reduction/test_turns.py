"""Tests of several optimizers of the same parameters: each gradient is reduced once, by the optimizer that was used last."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import batch, chain, difference, loss, loss_of_all, same_everywhere, sgd, wrap as wrapped
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


@pytest.mark.parametrize(
    ("stages", "op"),
    [
        ((0, 0), hc.Average),
        ((0, 0), hc.Sum),
        ((1, 0), hc.Sum),
        ((0, 2), hc.Sum),
        ((2, 0), hc.Sum),
    ],
)
def test_steps_after_one_backward_pass(stages: tuple[int, int], op: Any) -> None:
    """The first step uses up what is split; a gradient that is not stays for the second."""
    model, reference = chain(3), chain(3)
    older, newer = (wrap(model, stage, op=op) for stage in stages)
    bare = sgd(reference)
    for step in range(5):
        for one in (older, newer, bare):
            one.zero_grad()
        loss(model, step).backward()
        loss_of_all(reference, step, op).backward()
        turns = (newer, older) if step == 3 else (older, newer)
        for turn, one in enumerate(turns):
            one.step()
            if turn == 0 or turns[0].shard_stage < 2:
                bare.step()
    assert difference(model, reference) < 2e-6
    same_everywhere(model)


@pytest.mark.parametrize(
    ("stages", "op"),
    [((0, 0), hc.Sum), ((0, 2), hc.Sum), ((2, 2), hc.Average)],
)
def test_two_losses_with_a_trunk_of_both(stages: tuple[int, int], op: Any) -> None:
    """Each optimizer has its head and the trunk, and is used once or twice in a row."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, *heads = chain(3)
            self.heads = nn.ModuleList(heads)

    def own(model: Heads, head: int) -> list[nn.Parameter]:
        return [*model.trunk.parameters(), *model.heads[head].parameters()]

    def loss_of(model: Heads, head: int, step: int, rank: int) -> torch.Tensor:
        return (model.heads[head](model.trunk(batch(step, rank))) - 0.3).square().mean()

    model, reference = Heads(), Heads()
    optimizers = [
        wrap(model, stage, torch.optim.SGD(own(model, head), lr=0.1), op=op)
        for head, stage in enumerate(stages)
    ]
    bares = [torch.optim.SGD(own(reference, head), lr=0.1) for head in (0, 1)]
    for step, head in enumerate((1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0)):
        optimizers[head].zero_grad()
        loss_of(model, head, step, hc.rank()).backward()
        optimizers[head].step()
        bares[head].zero_grad()
        losses = torch.stack([loss_of(reference, head, step, rank) for rank in range(hc.size())])
        (losses.sum() if op == hc.Sum else losses.mean()).backward()
        bares[head].step()
    assert difference(model, reference) < 2e-6
    same_everywhere(model)


def test_a_sum_that_more_is_added_to() -> None:
    model, reference = chain(3), chain(3)
    older, newer = wrap(model, op=hc.Sum), wrap(model, op=hc.Sum)
    bare = sgd(reference)
    for step in range(6):  # gradients pile up
        loss(model, step).backward()
        loss_of_all(reference, step, hc.Sum).backward()
        for one in (newer, newer, older)[step % 3 :]:
            one.step()
            bare.step()
        if step == 3:
            for net in (model, reference):
                net.zero_grad(set_to_none=False)
        torch.autograd.grad(loss(model, step), list(model.parameters()))  # adds nothing
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert difference(model, reference) < 1e-5


def test_an_optimizer_made_for_a_while() -> None:
    """The newer one has died, on some ranks, and the older one goes on: as before, after two steps."""
    model, reference = chain(3), chain(3)
    older = wrap(model)
    before = train(model, older, range(3))[-1]
    newer = wrap(model)
    train(model, newer, range(3))
    cycle = [newer] if hc.rank() else []
    cycle.append(cycle)
    del newer, cycle
    reference.load_state_dict(model.state_dict())
    bare = sgd(reference)
    for step in range(4):
        older.zero_grad()
        loss(model, step).backward()
        hc.clip_grad_norm_(model.parameters(), 0.5)
        older.step()
        bare.zero_grad()
        loss_of_all(reference, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        bare.step()
    assert older.reduction_stats.last.launches_in_backward == before
    assert difference(model, reference) < 1e-6


def test_gradients_of_an_older_optimizer_are_dropped() -> None:
    model = chain(3)
    older = wrap(model)
    train(model, older, range(2))
    older.zero_grad()
    loss(model, 2).backward()
    newer = wrap(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = copy.deepcopy(model)
    newer.zero_grad()
    loss(model, 3).backward()
    newer.step()
    loss_of_all(reference, 3).backward()
    sgd(reference).step()
    assert difference(model, reference) < 1e-6


LOADS: dict[str, Callable[[Any], None]] = {
    "order": lambda optimizer: optimizer.load_reduction_state_dict(optimizer.reduction_state_dict()),
    "reset": lambda optimizer: optimizer.reset_reduction(),
}


@pytest.mark.parametrize(
    ("load", "stage"),
    [("order", 0), ("order", 2), ("reset", 0), ("reset", 3)],
)
def test_an_order_loaded_between_backward_and_step_drops_all_gradients(load: str, stage: int) -> None:
    model, reference = chain(3), chain(3)
    optimizer, bare = wrap(model, stage), sgd(reference)
    for step in range(5):
        loss(model, step).backward()
        if step > 1:
            if step == 3:
                optimizer.synchronize()
            LOADS[load](optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.zero_grad()
            loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of_all(reference, step).backward()
        bare.step()
        bare.zero_grad()
    with optimizer.gathered_parameters():
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
