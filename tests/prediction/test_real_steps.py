"""Real steps against predictions: the memory that they take, and their collectives, counted where Horovod gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from estimates import measured_peak
from horovod.torch import mpi_ops
from torch.nn import functional

import hvd_ckpt as hc
from benchmarks.ways import step_in
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes
from hvd_ckpt.prediction.training_layout import TrainingLayout

pytestmark = pytest.mark.ranks(gloo=(1, 2))

WITHIN = 0.10
SMALL = {"vocabulary": 128, "length": 32, "width": 64, "heads": 2, "layers": 2}
WIDE = {"vocabulary": 1024, "length": 8, "width": 256, "heads": 4, "layers": 2}
CAP_MB = 2  # of a bucket of the wide model: several of them
EVERY = 3
Operation = tuple[str, int]


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("shard", "recompute", "precision"),
    [
        (0, False, "fp32"),
        pytest.param(1, True, "bf16-params", marks=pytest.mark.ranks(gloo=(2,))),
        pytest.param(hc.Shard(2, wire="int8"), False, "fp32", marks=pytest.mark.ranks(gloo=(2,))),
        (3, True, "fp32"),
    ],
)
def test_a_step_takes_the_memory_that_was_estimated(shard: Any, recompute: bool, precision: str) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        made = gpt(**SMALL, checkpoint_interval=int(recompute))
        return made.bfloat16() if precision == "bf16-params" else made

    batch = torch.arange(4 * 32).view(4, 32) % 128
    loss, options = partial(loss_of, targets=batch), {"shard": shard, "bucket_cap_mb": 0.25}
    estimate = hc.estimate_memory(
        model().float(), hc.size(), precision=precision, sample=batch, loss=loss, **options
    )
    for _ in range(3):  # on a busy machine Horovod's threads may hold on to a buffer in one recording
        peak = measured_peak(model, batch, loss, **options)
        if abs(estimate.recorded_peak / peak - 1) <= WITHIN:
            break
    assert abs(estimate.recorded_peak / peak - 1) <= WITHIN, (estimate.recorded_peak, peak, str(estimate))


@contextmanager
def counting() -> Iterator[list[Operation]]:
    """What this rank hands to Horovod within it: the kind and the bytes of each operation."""
    operations: list[Operation] = []

    def counted(name: str, kind: str) -> Callable[..., Any]:
        original = getattr(mpi_ops, name)

        def enqueue(*arguments: Any) -> Any:
            sent, text = arguments[0], next(given for given in arguments if isinstance(given, str))
            # A rank hands over its part of what is gathered in all. A reduce-scatter is an alltoall of that name.
            nbytes = sent.nbytes * (arguments[3].size() if kind == "all_gather" else 1)
            operations.append(
                ("scatter" if kind == "alltoall" and ".reduce_scatter." in text else kind, nbytes)
            )
            return original(*arguments)

        return enqueue

    names = {
        "_allreduce_async": "allreduce",
        "_allgather_async": "all_gather",
        "_alltoall_async": "alltoall",
        "_broadcast_async": "broadcast",
    }
    with mock.patch.multiple(mpi_ops, **{name: counted(name, kind) for name, kind in names.items()}):
        yield operations


@pytest.mark.ranks(gloo=(2, 4))
@pytest.mark.parametrize("way", ["none", "optimizer", "gradients", "parameters", "replicas", "local"])
def test_a_step_sends_what_follows_from_sizes(way: str) -> None:
    torch.manual_seed(0)
    model = gpt(**WIDE, checkpoint_interval=1)
    sizes = ModelSizes(model, [0.0] * len(model), [0.0] * len(model), cap=CAP_MB << 20)
    predicted = step_in(way, sizes, TrainingLayout(hc.size(), every=EVERY), Network()).operations
    bare, named = torch.optim.AdamW(model.parameters(), lr=1e-3), list(model.named_parameters())
    if way == "local":
        optimizer: Any = hc.LocalSGD(bare, named_parameters=named, every=EVERY)
    else:
        how = {"replicas": hc.size()} if way == "replicas" else {"shard": way}
        optimizer = hc.DistributedOptimizer(bare, named, model=model, bucket_cap_mb=CAP_MB, **how)
    inputs, targets = (torch.randint(0, WIDE["vocabulary"], (2, WIDE["length"])) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        for replica in optimizer.local_replicas() if way == "replicas" else [nullcontext()]:
            with replica:
                loss_of(model(inputs), targets).backward()
        optimizer.step()

    steps = EVERY if way == "local" else 1
    for _ in range(max(3, steps)):  # orders are learned in the first ones; local SGD begins after an average
        step()
    with counting() as operations:
        for _ in range(steps):
            step()
    if way == "replicas":
        # First messages leave in one order, a bucket's second one once its first one is here: at any time.
        operations, predicted = (
            sorted(found, key=lambda shape: (shape[0], shape[0] == "all_gather" and shape[1]))
            for found in (operations, predicted)
        )
    assert [kind for kind, _ in operations] == [kind for kind, _ in predicted]
    # Parts of sums are rounded up to whole elements.
    assert [size for _, size in operations] == pytest.approx([size for _, size in predicted], rel=1e-4)
