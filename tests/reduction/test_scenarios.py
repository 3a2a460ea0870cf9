"""Tests of when gradients leave and where they are held; graphs: tests/differential/named.py."""

from __future__ import annotations

import pytest
import torch
from one_process import chain, check_weights, loss, same_everywhere, sgd, train, train_for_all, trained, wrap
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.utils.memory import measure_peak

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def test_a_gradient_that_is_asked_for_in_mid_backward() -> None:
    """A hook runs ``torch.autograd.grad`` on a parameter whose bucket has left."""
    model, reference = chain(), chain()

    def ask(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(loss(model[3], 0), list(model[3].parameters()))

    model[2].register_forward_hook(lambda module, args, output: output.register_hook(ask) and None)
    train(model, wrap(model), range(5))
    train_for_all(reference, sgd(reference), range(5))
    check_weights(model, reference)


@pytest.mark.parametrize("stage", [0, 2])
def test_buckets_leave_in_the_backward_pass(stage: int) -> None:
    """All but the last, which has the flags; shards have these in a message of their own."""
    _, optimizer = trained(chain(), steps=3, shard=stage)
    last = optimizer.reduction_stats.last
    assert last.launches_in_backward == len(last.launch_order) - (stage == 0) > 2
    assert len(set(last.launch_order)) == len(last.launch_order)
    assert last.late_gradients == last.unbucketed_gradients == []
    assert stage or last.control_messages == 0


def test_groups_as_lists_of_parameters() -> None:
    for pick in (slice(0, 4), slice(3, 7)):
        model = chain()
        parameters = list(model.parameters())
        _, optimizer = trained(model, steps=3, groups=[parameters[pick]], bucket_cap_mb=25.0)
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


def test_elastic_ranks_that_have_built_other_numbers_of_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    survivors = [wrap(chain()) for _ in range(2 if hc.rank() == 0 else 0)]
    model = chain()
    optimizer = wrap(model)
    state = hc.elastic.TorchState(model=model, optimizer=optimizer)
    state.sync()
    train(model, optimizer, range(3))
    same_everywhere(model)
    del survivors


def test_a_rank_that_does_not_use_the_first_bucket_still_overlaps() -> None:
    model = chain(6)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        used = model if hc.rank() == 0 else model[:4]
        loss(used, step).backward()
        optimizer.step()
    stats = optimizer.reduction_stats.last
    assert stats.launches_in_backward == len(stats.launch_order) - 1
    assert stats.late_gradients == []


WIDE, LAYERS, CAP_MB = 256, 16, 1.0
BUCKET = int(CAP_MB * 2**20)


def peaks(distributed: bool) -> tuple[int, int]:
    """Bytes that the first step, and the largest of some later ones, allocate; gradients are the largest part."""
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    optimizer = wrap(model, bucket_cap_mb=CAP_MB) if distributed else sgd(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, WIDE)).mean().backward()
        optimizer.step()

    first = measure_peak(step).peak_bytes
    optimizer.zero_grad()
    return first, max(measure_peak(step).peak_bytes for _ in range(3))


@pytest.mark.ranks(gloo=(2,))
def test_gradients_are_held_once() -> None:
    """Above one process: at most one bucket, in the first step and later ones."""
    alone_first, _ = peaks(distributed=False)
    first, later = peaks(distributed=True)
    slack = BUCKET + BUCKET // 4  # the last bucket and its control flags, activations
    assert first <= alone_first + slack
    # Kept buckets are allocated before the measurement starts, so a later step allocates little beyond one bucket.
    assert later <= 2 * slack
