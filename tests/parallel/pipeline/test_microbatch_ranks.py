"""Micro-batches and deferred batch norm over ranks that have different numbers of samples and terms."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from same import assert_same
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.data.objectives import Batch

pytestmark = pytest.mark.ranks(gloo=(2, 4))

NONE = -100


def samples(step: int, rank: int) -> Batch:
    """The batch of a rank, the same wherever it is made; of several ranks, the last has no terms."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 5 + 2 * rank
    targets = torch.randint(5, (rows, 4), generator=generator)
    for row in range(rows):
        targets[row, (row + rank) % 5 :] = NONE
    if rank > 0 and rank == hc.size() - 1:
        targets[:] = NONE
    return Batch((torch.randn(rows, 4, 6, generator=generator, dtype=torch.float64),), targets)


def everybodys(step: int) -> Batch:
    parts = [samples(step, rank) for rank in range(hc.size())]
    return Batch(
        (torch.cat([part.inputs[0] for part in parts]),), torch.cat([part.targets for part in parts])
    )


def mean_loss(model: nn.Module, part: Batch) -> Tensor:
    """The mean over the terms; nan where there are none."""
    output = model(*part.inputs).flatten(0, 1)
    return nn.functional.cross_entropy(output, part.targets.flatten(), ignore_index=NONE)


def terms(part: Batch) -> Tensor:
    return (part.targets != NONE).sum()


def chain(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, *middle, nn.Linear(6, 5)).double()


def distributed(model: nn.Module) -> Any:
    return hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        bucket_cap_mb=3e-4,
    )


@pytest.mark.parametrize(
    "checkpoint, use_reentrant",
    [("always", False), ("always", True), ("except_last", True), ("never", False)],
)
def test_trains_as_one_process_with_the_samples_of_all(checkpoint: str, use_reentrant: bool) -> None:
    plain, model = chain(), hc.CheckpointSequential(chain(), 3, use_reentrant, keep_last=False)
    reference, optimizer = torch.optim.SGD(plain.parameters(), lr=0.1), distributed(model)
    for step in range(3):
        reference.zero_grad()
        expected = mean_loss(plain, everybodys(step))
        expected.backward()
        optimizer.zero_grad()
        loss, weight = hc.accumulate(
            functools.partial(mean_loss, model),
            samples(step, hc.rank()),
            3,
            checkpoint=checkpoint,
            weight=terms,
            across_ranks=True,
        )
        optimizer.synchronize()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-9)
        part = torch.stack([loss * weight, torch.tensor(weight).double()])
        losses = hc.allgather(part[None], name="losses")
        assert_same([losses[:, 0].sum() / losses[:, 1].sum()], [expected.detach()], 1e-9)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.step()
        last = optimizer.reduction_stats.last
        assert set(last.launches.values()) == {1} and len(last.launches) > 2
        assert step == 0 or not last.late_gradients


def seen_by(rank: int) -> list[Tensor]:
    """What a rank's norms see in a mini-batch; of several ranks, rank 1 sees nothing."""
    generator = torch.Generator().manual_seed(rank)
    parts = 0 if rank == 1 else 2 + rank
    return [torch.randn(3 + rank, 4, 5, generator=generator).double() * 3 + rank for _ in range(parts)]


def test_statistics_pooled_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    allgather = hvd.allgather
    monkeypatch.setattr(
        hvd, "allgather", lambda *args, **kwargs: calls.append(1) or allgather(*args, **kwargs)
    )
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3, momentum=None)).double()
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.DeferredBatchNorm.convert(model)
    for _ in range(2):
        for part in seen_by(hc.rank()):
            hc.checkpoint(model, part).sin().sum().backward()
        hc.commit_batch_norm(model, across_ranks=True)
    assert len(calls) == 2
    # The second norm sees what the first has normalized, by the statistics of each part.
    inner = nn.Sequential(nn.BatchNorm1d(4, affine=False, track_running_stats=False), model[1])
    everything = [part for rank in range(hc.size()) for part in seen_by(rank)]
    second = [inner(part).detach() for part in everything]
    for norm, inputs, weight in ((model[0], everything, 0.19), (model[2], second, 1.0)):
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        assert norm.num_batches_tracked == 2
        assert_same([norm.running_mean], [weight * values.mean(1)], 1e-9)
        assert_same([norm.running_var], [1 - weight + weight * values.var(1)], 1e-9)
    states = hc.allgather_object({name: value.tolist() for name, value in model.state_dict().items()})
    assert all(state == states[0] for state in states)
