"""Tests of ranks that are apart, in options, groups, numbers of steps or values: they agree, or all raise one sentence."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from one_process import (
    WIDTH,
    chain,
    check_weights,
    difference,
    loss,
    raises_everywhere,
    same_everywhere,
    sgd,
    train,
    train_for_all,
    trained,
    wrap,
)
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(("owner", "base"), [(0, {}), (-1, {"shard": 3})], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replicas", 4),
        ("shard", 1),
        ("op", hc.Sum),
        ("compression", hc.Compression.fp16),
        ("process_set", [0]),
        ("backward_passes_per_step", 2),
        ("bucket_cap_mb", 1.0),
        ("sparse_as_dense", True),
        ("keep_buckets", False),
        ("groups", 2),
        ("gradient_predivide_factor", 2.0),
        ("within", "host"),
        ("offload", "optimizer"),
        ("wire", "bf16"),
        ("master_weights", True),
        ("elementwise", True),
        ("units", []),
    ],
)
def test_an_option_on_one_rank(name: str, value: Any, base: dict[str, Any], owner: int) -> None:
    model = chain()
    value = hc.add_process_set(value) if name == "process_set" else value
    options = {**base, name: value} if hc.rank() == owner % hc.size() else base
    text = raises_everywhere(ValueError, f"{name} differs between ranks", lambda: wrap(model, **options))
    assert "rank" in text.partition("differs between ranks: ")[2]
    if name == "process_set":
        hc.remove_process_set(value)


def test_another_class_on_one_rank() -> None:
    model = chain()
    bare = (torch.optim.Adam if hc.rank() else torch.optim.AdamW)(model.parameters())
    message = "optimizer differs between ranks: 'AdamW' on rank 0"
    raises_everywhere(ValueError, message, lambda: wrap(model, bare))


# ---------------------------------------------------------------------------------------------------- groups from sets


def groups_of(model: nn.Module, shuffle: bool = True) -> list[dict[str, Any]]:
    """Weights and biases, in another order on each rank, as sets give them."""
    named = list(model.named_parameters())
    generator = torch.Generator().manual_seed(hc.rank())
    order = torch.randperm(len(named), generator=generator).tolist() if shuffle else range(len(named))
    weights, biases = (
        [named[place][1] for place in order if named[place][0].endswith(end)] for end in ("weight", "bias")
    )
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW([dict(group) for group in groups], lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    "options",
    [{}, {"shard": 1}, {"shard": 2}, {"shard": 3}, {"bucket_cap_mb": 1.0}, {"local": True}],
    ids=str,
)
@pytest.mark.parametrize("names", ["model", "shuffled"])
def test_groups_in_another_order_on_each_rank(options: dict[str, Any], names: str) -> None:
    model, reference = chain(), chain()
    groups = groups_of(model)
    bare = adamw(groups)
    known = list(model.named_parameters())[:: -1 if names == "shuffled" and hc.rank() % 2 else 1]
    if "local" in options:
        optimizer: Any = hc.LocalSGD(bare, named_parameters=known, every=1, moments="average", model=model)
    else:
        options = {"bucket_cap_mb": 0.0002, **options}
        optimizer = distribute(bare, named_parameters=known, model=model, **options)
    for own, given in zip(bare.param_groups, groups):
        assert optimizer.shard_stage or all(a is b for a, b in zip(own["params"], given["params"]))
    train(model, optimizer, range(3))
    hc.broadcast_optimizer_state(optimizer, root_rank=hc.size() - 1)
    train(model, optimizer, range(3, 5))
    train_for_all(reference, adamw(groups_of(reference, shuffle=False)), range(5))
    # Local steps are others.
    check_weights(model, reference, optimizer, tolerance=1.0 if "local" in options else 1e-5)


def test_a_parameter_in_another_group_on_one_rank_is_refused() -> None:
    model = chain()
    weights, biases = groups_of(model)
    if hc.rank() == 0:
        biases["params"].append(weights["params"].pop())
    optimizer = wrap(model, torch.optim.Adam([weights, biases]))
    raises_everywhere(ValueError, "group 0 differs", lambda: hc.broadcast_optimizer_state(optimizer, 0))


# ---------------------------------------------------------------------------------------------------- join


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_joins_before_the_others(steps: int) -> None:
    """It has taken no step at all, or some; and has collected an optimizer that the others still have."""
    old = [wrap(chain())]
    model = chain()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if hc.rank() == 0:
        old.clear()
        gc.collect()
    train(model, optimizer, range(steps + 3 * min(hc.rank(), 1)))
    last = hc.join()
    hc.broadcast_parameters(model.state_dict(), root_rank=last)
    hc.broadcast_optimizer_state(optimizer, root_rank=last)
    train(model, optimizer, range(3))
    same_everywhere(model)
    assert difference(model, chain()) > 1e-3


def test_join_with_sparse_gradients_is_one_sentence_on_all_ranks() -> None:
    """Equal numbers of entries in each step: Horovod knows the message from before."""
    model = nn.ModuleDict({"words": nn.Embedding(10, WIDTH, sparse=True)})
    hc.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrap(model)

    def epoch() -> None:
        for step in range(3 + hc.rank()):
            optimizer.zero_grad()
            model["words"](torch.tensor([1 + step % 3, 5])).sum().backward()
            optimizer.step()
        hc.join()

    raises_everywhere(ValueError, "gradient of parameter 'words.weight'.*join.*sparse_as_dense", epoch)


def test_join_before_other_collective_calls_is_one_sentence_on_all_ranks() -> None:
    model, _ = trained(chain())
    for call in (
        lambda: hc.broadcast_parameters(model.state_dict(), 0),
        lambda: hc.broadcast_object(1, 0),
        lambda: wrap(model),
    ):
        call()  # so that Horovod knows the messages
        raises_everywhere(ValueError, "join", lambda call=call: hc.join() if hc.rank() == 0 else call())


def test_join_with_synchronized_batch_norm_counts_the_ranks_that_are_there() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), hc.SyncBatchNorm(WIDTH))
    model, optimizer = trained(model, steps=2 + hc.rank())
    last = hc.join()
    if hc.rank() == last:  # whose last batch was its own alone
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
        assert int(model[1].num_batches_tracked) == 2 + last
    hc.broadcast_parameters(model.state_dict(), last)
    hc.broadcast_optimizer_state(optimizer, last)
    train(model, optimizer, range(2))
    same_everywhere(model)


@pytest.fixture
def some() -> Iterator[Any]:
    members = hc.add_process_set([0, 1])
    yield members
    hc.remove_process_set(members)


@pytest.mark.ranks(gloo=(3,), mpi=(4,))
def test_join_with_an_optimizer_of_a_process_set(some: Any) -> None:
    model = chain()
    optimizer = wrap(model, process_set=some)
    if some.included():
        with pytest.raises(ValueError, match="process_set"):
            hc.join()
    train(model, optimizer, range(1))


@pytest.mark.ranks(gloo=(2,))
@pytest.mark.parametrize("steps", [0, 3])  # from the second step on, buckets leave in the backward pass
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("slow", [0, 1])
def test_join_with_gradients_that_are_not_reduced(ranks: tuple[int, ...], steps: int, slow: int) -> None:
    """The others would add their later gradients to sums that have this rank's, or those of this rank would be lost."""
    model, optimizer = trained(chain(), steps=steps)
    optimizer.zero_grad()
    if hc.rank() == slow:
        time.sleep(0.3)  # the other rank's buckets are in flight when it joins
    if hc.rank() in ranks:
        loss(model, 3, hc.rank()).backward()
    raises_everywhere(RuntimeError, r"join\(\) was called while SGD has gradients.*step\(\)", hc.join)
    optimizer.step()  # nothing is left of these gradients
    train(model, optimizer, range(steps, steps + 3))
    hc.join()
    same_everywhere(model)


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_closure_that_fails_on_one_rank_fails_on_all(is_begun: bool, shard: int) -> None:
    model, reference = chain(), chain()
    optimizer = wrap(model, shard=shard)

    def closure() -> torch.Tensor:
        if hc.rank() or is_begun:
            loss(model, 0).backward()
        if hc.rank() == 0:
            raise LookupError("a bad batch")
        return torch.zeros(())

    with pytest.raises(RuntimeError if hc.rank() else LookupError, match="a bad batch"):
        optimizer.step(closure)
    train(model, optimizer, range(3))
    train_for_all(reference, sgd(reference), range(3))
    check_weights(model, reference)


def test_a_torch_sync_batch_norm_left_over_is_named() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with pytest.warns(UserWarning, match="module '1' is a torch.nn.SyncBatchNorm"):
        wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = wrap(hc.SyncBatchNorm.convert(model))
    train(model, optimizer, range(2))
    means = hc.allgather_object(model[1].running_mean.tolist())
    assert all(mean == means[0] for mean in means)


# ---------------------------------------------------------------------------------------------------- recomputation

WAYS: dict[str, dict[str, Any]] = {
    "buckets": {},
    "passes": {"backward_passes_per_step": 2},
    "replicas": {"replicas": 4},
    "stage 1": {"shard": "optimizer"},
    "stage 2": {"shard": "gradients"},
    "stage 3": {"shard": "parameters"},
}


class Forgetful(nn.Module):
    """Counts its passes, recomputations too, and scales by the count on some ranks."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.broken = broken
        self.count = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.linear(x) * (self.count if self.broken else 1)
        return out.sin()


def recomputed(model: nn.Sequential, **options: Any) -> torch.Tensor:
    return hc.checkpoint(model[1], model[0](torch.randn(3, 4)), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_is_wrong_on_one_rank_is_raised_on_all(way: str, reentrant: bool) -> None:
    """With the name of the module, and training may go on."""
    if way == "replicas" and hc.size() not in (2, 4):
        pytest.skip("replicas are a power of two")
    torch.manual_seed(0)
    last = hc.size() - 1
    model = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == last), nn.Linear(4, 1))
    optimizer = wrap(model, **WAYS[way])

    def backward() -> None:
        passes = WAYS[way].get("backward_passes_per_step", 1)
        for context in optimizer.local_replicas() if way == "replicas" else [nullcontext()] * passes:
            with context:
                model[2](recomputed(model, use_reentrant=reentrant)).sum().backward()

    backward()
    with pytest.raises(hc.RecomputationMismatch, match=f"rank {last}: .*Forgetful"):
        optimizer.step()
    model[1].broken = False
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        optimizer.step()


def test_a_wrong_recomputation_in_a_pass_of_two_optimizers_is_raised_by_both() -> None:
    """Whichever steps first must not take the step."""
    torch.manual_seed(0)
    generator, discriminator = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == 0)), nn.Linear(4, 1)
    optimizers = [wrap(generator), wrap(discriminator)]
    for step in range(3):
        for optimizer in optimizers if step else ():
            optimizer.zero_grad()
        discriminator(recomputed(generator)).sum().backward()
        mismatch = pytest.raises(hc.RecomputationMismatch, match="rank 0: .*Forgetful")
        for optimizer in optimizers:
            with nullcontext() if step else mismatch:
                optimizer.step()
        generator[1].broken = False


def test_a_wrong_recomputation_without_a_distributed_optimizer_is_raised_at_once() -> None:
    """Another optimizer has begun a step, and may never end it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = wrap(model)
    model(torch.randn(3, 4)).sum().backward()
    plain = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == 0))
    with pytest.raises(hc.RecomputationMismatch) if hc.rank() == 0 else nullcontext():
        recomputed(plain).sum().backward()
    optimizer.step()
