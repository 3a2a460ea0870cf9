"""Micro-batches and deferred batch norm over ranks that have different numbers of samples and terms."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd
import pytest
import torch
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


class SyncedBlock(nn.Sequential):
    """Batch norm over the batches of all ranks, which exchange sums in the backward pass as well."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.Linear(6, 6), norm, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return out


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


def close(left: list[Any], right: list[Any], tolerance: float = 1e-9) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


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
        close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        part = torch.stack([loss * weight, torch.tensor(weight).double()])
        losses = hc.allgather(part[None], name="losses")
        close([losses[:, 0].sum() / losses[:, 1].sum()], [expected.detach()])
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.step()
        last = optimizer.reduction_stats.last
        assert set(last.launches.values()) == {1} and len(last.launches) > 2
        assert step == 0 or not last.late_gradients


def test_a_rank_without_terms_gives_the_others_no_nan() -> None:
    """Its backward pass runs, and exchanges what a synchronized batch norm exchanges."""
    plain, model = chain(SyncedBlock(nn.BatchNorm1d(6))), chain(SyncedBlock(hc.SyncBatchNorm(6)))
    model.load_state_dict(plain.state_dict())
    mean_loss(plain, everybodys(0)).backward()
    optimizer = distributed(model)

    def compute(part: Batch) -> Tensor:
        valid = part.targets != NONE
        losses = nn.functional.cross_entropy(
            model(*part.inputs).flatten(0, 1), part.targets.flatten().clamp(min=0), reduction="none"
        )
        return (losses * valid.flatten()).sum() / valid.sum()

    hc.accumulate(compute, samples(0, hc.rank()), 1, weight=terms, across_ranks=True)
    optimizer.synchronize()
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


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
        close([norm.running_mean], [weight * values.mean(1)])
        close([norm.running_var], [1 - weight + weight * values.var(1)])
    states = hc.allgather_object({name: value.tolist() for name, value in model.state_dict().items()})
    assert all(state == states[0] for state in states)
