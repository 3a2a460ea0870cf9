"""Several optimizers of the same parameters: each gradient is reduced once, by the one that was made or synchronized last."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH, batch, difference, fingerprint
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

SMALL = 0.0002  # MiB: a bucket per parameter
STAGES = (0, 1, 2)  # another optimizer for a model of stage 3 needs unshard()


def chain(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)])


def wrap(model: nn.Module, stage: int = 0, bare: Any = None, **options: Any) -> Any:
    bare = torch.optim.SGD(model.parameters(), lr=0.1) if bare is None else bare
    return hc.DistributedOptimizer(
        bare, named_parameters=model.named_parameters(), bucket_cap_mb=SMALL, shard=stage, **options
    )


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return (model(batch(step, rank)) - 0.3).square().mean()


def everywhere(model: nn.Module, step: int, op: Any = hc.Average) -> torch.Tensor:
    """What one process would compute."""
    losses = torch.stack([loss(model, step, rank) for rank in range(hc.size())])
    return losses.sum() if op == hc.Sum else losses.mean()


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[int]:
    launches = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, hc.rank()).backward()
        optimizer.step()
        launches.append(optimizer.reduction_stats.last.launches_in_backward)
    return launches


def same_everywhere(model: nn.Module) -> None:
    weights = hc.allgather_object(fingerprint(model))
    assert all(other == weights[0] for other in weights)


@pytest.mark.parametrize("stage", STAGES)
def test_a_replaced_optimizer_costs_no_overlap_and_is_not_clipped(stage: int) -> None:
    model, reference = chain(), chain()
    optimizer = wrap(model, stage)
    expected = train(model, optimizer, range(4))
    assert expected[-1] > 0
    kept = [optimizer] if hc.rank() != 1 else []  # Python has not collected it on all ranks
    optimizer = wrap(model, stage, op=hc.Sum)
    gc.collect()
    reference.load_state_dict(model.state_dict())
    bare = plain(reference)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, hc.rank()).backward()
        norm = hc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert optimizer.reduction_stats.last.launches_in_backward == expected[step]
        bare.zero_grad()
        everywhere(reference, step, hc.Sum).backward()
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
        ((2, 0), hc.Average),
        ((2, 0), hc.Sum),
    ],
)
def test_steps_after_one_backward_pass(stages: tuple[int, int], op: Any) -> None:
    """The first step uses up what is split; a gradient that is not stays for the second."""
    model, reference = chain(), chain()
    older, newer = (wrap(model, stage, op=op) for stage in stages)
    bare = plain(reference)
    for step in range(5):
        for one in (older, newer, bare):
            one.zero_grad()
        loss(model, step, hc.rank()).backward()
        everywhere(reference, step, op).backward()
        turns = (newer, older) if step == 3 else (older, newer)
        for turn, one in enumerate(turns):
            one.step()
            if turn == 0 or turns[0].shard_stage < 2:
                bare.step()
    assert difference(model, reference) < 2e-6
    same_everywhere(model)


@pytest.mark.parametrize(
    ("stages", "op"),
    [((0, 0), hc.Average), ((0, 0), hc.Sum), ((0, 2), hc.Sum), ((2, 2), hc.Average), ((2, 2), hc.Sum)],
)
def test_two_losses_with_a_trunk_of_both(stages: tuple[int, int], op: Any) -> None:
    """Each optimizer has its head and the trunk, and is used once or twice in a row."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, *heads = chain()
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
    model, reference = chain(), chain()
    older, newer = wrap(model, op=hc.Sum), wrap(model, op=hc.Sum)
    bare = plain(reference)
    for step in range(6):  # gradients pile up
        loss(model, step, hc.rank()).backward()
        everywhere(reference, step, hc.Sum).backward()
        for one in (newer, newer, older)[step % 3 :]:
            one.step()
            bare.step()
        if step == 3:
            for net in (model, reference):
                net.zero_grad(set_to_none=False)
        torch.autograd.grad(loss(model, step, hc.rank()), list(model.parameters()))  # adds nothing
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert difference(model, reference) < 1e-5


def test_an_optimizer_made_for_a_while() -> None:
    """The newer one has died, on some ranks, and the older one goes on: as before, after two steps."""
    model, reference = chain(), chain()
    older = wrap(model)
    before = train(model, older, range(3))[-1]
    newer = wrap(model)
    train(model, newer, range(3))
    cycle = [newer] if hc.rank() else []
    cycle.append(cycle)
    del newer, cycle
    reference.load_state_dict(model.state_dict())
    bare = plain(reference)
    for step in range(4):
        older.zero_grad()
        loss(model, step, hc.rank()).backward()
        hc.clip_grad_norm_(model.parameters(), 0.5)
        older.step()
        bare.zero_grad()
        everywhere(reference, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        bare.step()
    assert older.reduction_stats.last.launches_in_backward == before
    assert difference(model, reference) < 1e-6


def test_gradients_of_an_older_optimizer_are_dropped() -> None:
    model = chain()
    older = wrap(model)
    train(model, older, range(2))
    older.zero_grad()
    loss(model, 2, hc.rank()).backward()
    newer = wrap(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = copy.deepcopy(model)
    newer.zero_grad()
    loss(model, 3, hc.rank()).backward()
    newer.step()
    everywhere(reference, 3).backward()
    plain(reference).step()
    assert difference(model, reference) < 1e-6


def load_own(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def load_order(optimizer: Any) -> None:
    optimizer.load_reduction_state_dict(optimizer.reduction_state_dict())


def reset(optimizer: Any) -> None:
    optimizer.reset_reduction()


@pytest.mark.parametrize(
    ("load", "stage"),
    [
        (load_own, 0),
        (load_own, 1),
        (load_own, 2),
        (load_own, 3),
        (load_order, 0),
        (load_order, 2),
        (reset, 0),
        (reset, 3),
    ],
)
def test_a_state_loaded_between_backward_and_step_drops_all_gradients(
    load: Callable[[Any], None], stage: int
) -> None:
    model, reference = chain(), chain()
    optimizer, bare = wrap(model, stage), plain(reference)
    for step in range(5):
        loss(model, step, hc.rank()).backward()
        if step > 1:
            if step == 3:
                optimizer.synchronize()
            load(optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.zero_grad()
            loss(model, step, hc.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        everywhere(reference, step).backward()
        bare.step()
        bare.zero_grad()
    with optimizer.gathered_parameters():
        assert difference(model, reference) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_added_between_backward_and_step_keeps_all_gradients(stage: int) -> None:
    model, reference = chain(), chain()
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    bare = torch.optim.SGD(rest, lr=0.1)
    optimizer = wrap(model, stage, bare)
    theirs = torch.optim.SGD(reference[1:].parameters(), lr=0.1)
    for step in range(4):
        for one in (optimizer, theirs):
            one.zero_grad()
        for parameter in [*first, *reference[0].parameters()] if step < 3 else ():
            parameter.grad = None
        loss(model, step, hc.rank()).backward()
        everywhere(reference, step).backward()
        if step == 2:
            optimizer.add_param_group({"params": first})
            theirs.add_param_group({"params": list(reference[0].parameters())})
        optimizer.step()
        theirs.step()
    with optimizer.gathered_parameters():
        assert difference(model, reference) < 1e-6
