"""Tests of steps in which gradients come late, in groups, or are asked for in mid-backward; graphs: tests/differential/named.py."""

from __future__ import annotations

import pytest
import torch
from one_process import chain, difference, loss, same_everywhere, sgd, train, train_for_all, wrap

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def test_a_gradient_that_is_asked_for_in_mid_backward() -> None:
    """A hook runs ``torch.autograd.grad`` on a parameter whose bucket has left."""
    model, reference = chain(), chain()
    optimizer, bare = wrap(model), sgd(reference)

    def ask(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(loss(model[3], 0), list(model[3].parameters()))

    model[2].register_forward_hook(lambda module, args, output: output.register_hook(ask) and None)
    train(model, optimizer, range(5))
    train_for_all(reference, bare, range(5))
    assert difference(model, reference) < 1e-6
    same_everywhere(model)


@pytest.mark.parametrize("stage", [0, 2])
def test_buckets_leave_in_the_backward_pass(stage: int) -> None:
    """All but the last, which has the flags; shards have these in a message of their own."""
    model = chain()
    optimizer = wrap(model, shard=stage)
    train(model, optimizer, range(3))
    last = optimizer.reduction_stats.last
    assert last.launches_in_backward == len(last.launch_order) - (stage == 0) > 2
    assert len(set(last.launch_order)) == len(last.launch_order)
    assert last.late_gradients == last.unbucketed_gradients == []
    assert stage or last.control_messages == 0


def test_groups_as_lists_of_parameters() -> None:
    for pick in (slice(0, 4), slice(3, 7)):
        model = chain()
        parameters = list(model.parameters())
        optimizer = wrap(model, groups=[parameters[pick]], bucket_cap_mb=25.0)
        train(model, optimizer, range(3))
        apart = len(parameters) - len(parameters[pick])
        assert len(optimizer.reduction_stats.last.launch_order) == 1 + apart


def test_late_gradients_are_named_and_learned() -> None:
    model = chain()
    optimizer = wrap(model)
    late = []
    for step in range(5):
        optimizer.zero_grad()
        loss(model, step).backward()
        if step >= 3 and hc.rank() == 0:
            loss(model[3:], step).backward()
        optimizer.step()
        last = optimizer.reduction_stats.last
        late.append((last.late_gradients, last.unbucketed_gradients))
    names = ["3.0.weight", "3.0.bias"]
    assert late == [([], [])] * 3 + [(names, names), ([], [])]
