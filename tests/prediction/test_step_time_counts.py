"""The collectives of real steps are those of the formulas: kinds, bytes and order, counted where Horovod gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from horovod.torch import mpi_ops
from torch.nn import functional

import hvd_ckpt as hc
from benchmarks.ways import step_in
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes
from hvd_ckpt.prediction.training_layout import TrainingLayout

pytestmark = pytest.mark.ranks(gloo=(2, 4))

GPT: dict[str, Any] = {"vocabulary": 1024, "length": 8, "width": 256, "heads": 4, "layers": 2}
CAP_MB = 2  # of a bucket: several of them
EVERY = 3
Operation = tuple[str, int]


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


@pytest.mark.parametrize("way", ["none", "optimizer", "gradients", "parameters", "replicas", "local"])
def test_a_step_sends_what_follows_from_sizes(way: str) -> None:
    torch.manual_seed(0)
    model = gpt(**GPT, checkpoint_interval=1)
    sizes = ModelSizes(model, [0.0] * len(model), [0.0] * len(model), cap=CAP_MB << 20)
    predicted = step_in(way, sizes, TrainingLayout(hc.size(), every=EVERY), Network()).operations
    bare, named = torch.optim.AdamW(model.parameters(), lr=1e-3), list(model.named_parameters())
    if way == "local":
        optimizer: Any = hc.LocalSGD(bare, named_parameters=named, every=EVERY)
    else:
        how = {"replicas": hc.size()} if way == "replicas" else {"shard": way}
        optimizer = hc.DistributedOptimizer(bare, named, model=model, bucket_cap_mb=CAP_MB, **how)
    inputs, targets = (torch.randint(0, GPT["vocabulary"], (2, GPT["length"])) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        for replica in optimizer.local_replicas() if way == "replicas" else [nullcontext()]:
            with replica:
                functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
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
