"""Tests of differences between ranks: the next broadcast repairs them, or all ranks raise one sentence."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from horovod.torch import mpi_ops
from one_process import (
    WIDTH,
    chain,
    difference,
    loss,
    raises_everywhere,
    same_everywhere,
    train,
    train_for_all,
    wrap,
)
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives import agreement

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its plain optimizer after two steps of all ranks."""
    model = chain()
    plain = adam(model)
    train_for_all(model, plain, range(2))
    return model, plain


# ---------------------------------------------------------------------------------------------------- broadcasts


@pytest.mark.parametrize("what", ["load", "reduction", "reset", "all of it", "broadcast_object"])
@pytest.mark.parametrize("call", ["broadcast_optimizer_state", "broadcast_parameters"])
def test_an_optimizer_in_use_that_a_rank_has_changed_by_itself(what: str, call: str) -> None:
    model, reference = chain(), chain()
    optimizer, plain = wrap(model, adam(model)), adam(reference)
    unused = chain()
    other = wrap(unused, adam(unused))  # which nothing happens to
    train(model, optimizer, range(3))
    train_for_all(reference, plain, range(3))
    saved = copy.deepcopy((optimizer.state_dict(), optimizer.reduction_state_dict()))
    optimizer.zero_grad()
    if hc.rank() == hc.size() - 1:
        if what in ("load", "all of it"):
            optimizer.load_state_dict(saved[0])
        if what in ("reduction", "all of it"):
            optimizer.load_reduction_state_dict({**saved[1], "order": saved[1]["order"][::-1]})
        if what in ("reset", "all of it"):
            optimizer.reset_reduction()
    if what == "broadcast_object":
        if hc.rank() == 0:
            optimizer.load_state_dict(saved[0])
        optimizer.load_state_dict(hc.broadcast_object(saved[0] if hc.rank() == 0 else None))
    if call == "broadcast_parameters":
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        hc.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(3, 6))
    train_for_all(reference, plain, range(3, 6))
    same_everywhere(model)
    assert difference(model, reference) < 1e-6
    assert other.reduction_stats.steps == 0


def test_order_that_one_rank_has_learned_becomes_everybodys() -> None:
    """The reducer's state comes from the root, and gradients leave early on all ranks but those without counts."""
    model = chain()
    optimizer = wrap(model, adam(model))
    train(model, optimizer, range(2))
    saved = optimizer.reduction_state_dict()
    again = wrap(model, adam(model))
    if hc.rank() == 0:
        again.load_reduction_state_dict(saved)
    hc.broadcast_optimizer_state(again, root_rank=0)
    assert again.reduction_state_dict()["order"] == saved["order"]
    train(model, again, range(2))
    same_everywhere(model)
    assert again.reduction_stats.last.control_messages == 0


def test_an_optimizer_that_one_rank_collects_while_all_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has it any more, and Python collects it when it likes: on rank 0 as soon as ranks have told what they have."""
    model, forgotten = chain(), chain()
    optimizer, cycle = wrap(model, adam(model)), [wrap(forgotten, adam(forgotten))]
    train(forgotten, cycle[0], range(2))
    if hc.rank() == 0:
        cycle[0].reset_reduction()
    gathering, gather = [], mpi_ops.allgather

    def gather_and_collect(*args: Any, **options: Any) -> Any:
        gathered = gather(*args, **options)
        if hc.rank() == 0:
            gathering.append(gc.collect())
        return gathered

    gc.disable()
    try:
        cycle.append(cycle)
        del forgotten, cycle
        monkeypatch.setattr(mpi_ops, "allgather", gather_and_collect)
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    finally:
        gc.enable()
    assert bool(gathering) == (hc.rank() == 0)
    train(model, optimizer, range(2))
    same_everywhere(model)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_sharded_state_that_one_rank_loads_is_refused_on_all(shard: int) -> None:
    _, plain = trained()
    model = chain()
    optimizer = wrap(model, adam(model), shard=shard)

    def resume() -> None:
        if hc.rank() == 0:
            optimizer.load_state_dict(plain.state_dict())
        hc.broadcast_optimizer_state(optimizer, root_rank=0)

    raises_everywhere(RuntimeError, "different collective calls: .*load.* on rank 0.*broadcast", resume)
    optimizer.load_state_dict(plain.state_dict())
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2))


def test_calls_that_differ_are_named_on_all_ranks() -> None:
    model = chain()
    optimizer = wrap(model)

    def differ() -> None:
        if hc.rank():
            hc.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            hc.broadcast_optimizer_state(optimizer, root_rank=0)

    raises_everywhere(RuntimeError, "broadcast_optimizer_state.*rank 0.*broadcast_parameters.*rank 1", differ)
    train(model, optimizer, range(2))
    same_everywhere(model)


def test_a_root_that_is_no_rank_is_an_error_everywhere() -> None:
    model = chain()
    for call in (
        lambda: hc.broadcast_parameters(model.state_dict(), root_rank=hc.size()),
        lambda: hc.broadcast_optimizer_state(adam(model), root_rank=hc.size()),
        lambda: hc.broadcast_object(1, root_rank=hc.size()),
    ):
        raises_everywhere(ValueError, f"root_rank .*{hc.size()}", call)


@pytest.mark.parametrize("what", ["root_rank", "missing", "shape", "sparse", "meta"])
def test_broadcasts_name_what_differs(what: str) -> None:
    model = chain()
    state = dict(model.state_dict())
    last = hc.rank() == hc.size() - 1
    if what == "missing" and last:
        del state["1.0.weight"]
    elif what == "shape" and last:
        state["1.0.weight"] = torch.zeros(3)
    elif what == "sparse":
        state["1.0.weight"] = torch.eye(3).to_sparse()
    elif what == "meta" and last:
        state["1.0.weight"] = torch.zeros(8, 8, device="meta")
    root = int(what == "root_rank" and last)
    match = "root_rank differs" if what == "root_rank" else "'1.0.weight' (is|differs)"
    raises_everywhere(ValueError, match, lambda: hc.broadcast_parameters(state, root_rank=root))
    if what == "root_rank":
        optimizer = adam(model)
        raises_everywhere(ValueError, match, lambda: hc.broadcast_optimizer_state(optimizer, root))


# ---------------------------------------------------------------------------------------------------- options


def few() -> Any:
    return hc.add_process_set([0])


@pytest.mark.parametrize(("owner", "base"), [(0, {}), (-1, {"shard": 3})], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replicas", 4),
        ("shard", 1),
        ("op", hc.Sum),
        ("compression", hc.Compression.fp16),
        ("process_set", few),
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
    value = value() if value is few else value
    options = {**base, name: value} if hc.rank() == owner % hc.size() else base
    text = raises_everywhere(ValueError, f"{name} differs between ranks", lambda: wrap(model, **options))
    assert "rank" in text.partition("differs between ranks: ")[2]
    if name == "process_set":
        hc.remove_process_set(value)


def test_other_classes_on_one_rank() -> None:
    model = chain()
    bare = adam(model) if hc.rank() else torch.optim.AdamW(model.parameters())
    raises_everywhere(
        ValueError, "optimizer differs between ranks: 'AdamW' on rank 0", lambda: wrap(model, bare)
    )


# ---------------------------------------------------------------------------------------------------- groups from sets


def shuffled(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as sets give them, in another order on each rank."""
    named = list(model.named_parameters())
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(hc.rank())).tolist()
    named = [named[place] for place in order]
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    "options",
    [{}, {"shard": 1}, {"shard": 2}, {"shard": 3}, {"bucket_cap_mb": 1.0}, {"local": True}],
    ids=str,
)
@pytest.mark.parametrize("names", ["model", "shuffled"])
def test_groups_in_another_order_on_each_rank(options: dict[str, Any], names: str) -> None:
    model, reference = chain(), chain()
    groups = shuffled(model)
    bare = torch.optim.AdamW([dict(group) for group in groups], lr=0.01, weight_decay=0.1)
    known: Any = model.named_parameters()
    if names == "shuffled":
        known = list(model.named_parameters())[:: -1 if hc.rank() % 2 else 1]
    options = {"bucket_cap_mb": 0.0002, **options}
    if options.pop("local", False):
        optimizer: Any = hc.LocalSGD(bare, named_parameters=known, every=1, moments="average", model=model)
    else:
        optimizer = distribute(bare, named_parameters=known, model=model, **options)
    for own, given in zip(bare.param_groups, groups):
        assert optimizer.shard_stage or all(a is b for a, b in zip(own["params"], given["params"]))
    weights, biases = (
        [p for n, p in reference.named_parameters() if n.endswith(end)] for end in ("weight", "bias")
    )
    plain = torch.optim.AdamW(
        [{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1
    )
    train(model, optimizer, range(3))
    hc.broadcast_optimizer_state(optimizer, root_rank=hc.size() - 1)
    train(model, optimizer, range(3, 5))
    train_for_all(reference, plain, range(5))
    with optimizer.gathered_parameters():
        same_everywhere(model)
        if not hasattr(optimizer, "divergence"):  # local steps are others
            assert difference(model, reference) < 1e-5


def test_a_parameter_in_another_group_on_one_rank_is_refused() -> None:
    model = chain()
    weights, biases = shuffled(model)
    if hc.rank() == 0:
        biases["params"].append(weights["params"].pop())
    optimizer = wrap(model, torch.optim.Adam([weights, biases]))
    raises_everywhere(ValueError, "group 0 differs", lambda: hc.broadcast_optimizer_state(optimizer, 0))


# ---------------------------------------------------------------------------------------------------- join


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x)


def test_join_with_sparse_gradients_is_one_sentence_on_all_ranks() -> None:
    """Equal numbers of entries in each step: Horovod knows the message from before."""
    model = Words()
    optimizer = wrap(model)

    def epoch() -> None:
        for step in range(3 + hc.rank()):
            optimizer.zero_grad()
            model(torch.tensor([1 + step % 3, 5])).sum().backward()
            optimizer.step()
        hc.join()

    raises_everywhere(ValueError, "gradient of parameter 'words.weight'.*join.*sparse_as_dense", epoch)


def test_join_before_other_collective_calls_is_one_sentence_on_all_ranks() -> None:
    model = chain()
    optimizer = wrap(model, adam(model))
    train(model, optimizer, range(2))
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
    optimizer = wrap(model)
    train(model, optimizer, range(2 + hc.rank()))
    last = hc.join()
    if hc.rank() == last:  # whose last batch was its own alone
        mean = model[0](torch.zeros(1, WIDTH)).isfinite().all() and model[1].running_mean.isfinite().all()
        assert bool(mean) and int(model[1].num_batches_tracked) == 2 + last
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
    model = chain()
    optimizer = wrap(model)
    train(model, optimizer, range(steps))
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


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
def test_join_with_replicas() -> None:
    model = chain()
    optimizer = wrap(model, replicas=4)
    with pytest.raises(ValueError, match="replicas"):
        hc.join()
    assert optimizer.replicas.number == 4


# ---------------------------------------------------------------------------------------------------- errors


class OddError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


def test_an_object_may_be_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def broadcast(part: torch.Tensor, *args: Any, send: Any = mpi_ops.broadcast_, **options: Any) -> Any:
        sizes.append(part.numel())
        return send(part, *args, **options)

    monkeypatch.setattr(agreement, "LARGEST", 1000)
    monkeypatch.setattr(mpi_ops, "broadcast_", broadcast)
    content = bytes(range(256)) * 10
    assert hc.broadcast_object(content if hc.rank() == 1 else None, root_rank=1) == content
    assert sizes[:2] == [1000, 1000] and len(sizes) == 3
    everyone = [content[: 700 * rank] for rank in range(hc.size())]
    assert hc.allgather_object(everyone[hc.rank()]) == everyone


@pytest.mark.parametrize("kind", ["OSError", "KeyError", "Odd", "TypeError"])
def test_an_error_of_one_rank_is_of_its_class_on_all(kind: str) -> None:
    errors: dict[str, Exception] = {
        "OSError": FileNotFoundError(2, "missing", "place"),
        "KeyError": KeyError("place"),
        "Odd": OddError(3, "at this place"),
        "TypeError": TypeError("place"),
    }

    class Unsendable:
        def __reduce__(self) -> Any:
            raise errors[kind]

    text = raises_everywhere(
        type(errors[kind]), "place", lambda: hc.allgather_object(Unsendable() if hc.rank() else 1)
    )
    assert text.startswith("rank 1: ")


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_closure_that_fails_on_one_rank_fails_on_all(is_begun: bool, shard: int) -> None:
    model = chain()
    optimizer = wrap(model, shard=shard)

    def closure() -> torch.Tensor:
        if hc.rank() or is_begun:
            loss(model, 0).backward()
        if hc.rank() == 0:
            raise OddError(3, "a bad batch")
        return torch.zeros(())

    with pytest.raises(RuntimeError if hc.rank() else OddError, match="a bad batch"):
        optimizer.step(closure)
    train(model, optimizer, range(3))
    reference = chain()
    train_for_all(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(3))
    assert difference(model, reference) < 1e-6


# ---------------------------------------------------------------------------------------------------- batch norm


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
