"""Tests of sharded training through the public API: it equals training without shards for any model."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH as INPUTS, loss, train, wrap
from same import assert_same, whole_weights
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

STAGES = (1, 2, 3)
WIDTH = 24

Make = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


class Model(nn.Module):
    """Four recomputed blocks; one that nobody uses; a frozen one; a layer that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7 + hc.rank())  # of which rank 0's are to win
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.blocks[2][0].weight.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.blocks[3][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number == 1 else hc.checkpoint(block, x, use_reentrant=number == 3)
        return self.last(x)


def wrapped(model: nn.Module, make: Make, stage: int, **options: Any) -> Any:
    optimizer = wrap(model, make(model.parameters()), shard=stage, **{"bucket_cap_mb": 0.004, **options})
    if not stage:
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    return optimizer


def rounding() -> float:
    """The tolerance of sums over the ranks, which two add up in one order alone."""
    return 0.0 if hc.size() <= 2 else 1e-5


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
@pytest.mark.parametrize("stage", [1, 2])
def test_norms_of_any_order_are_those_of_torch(stage: int) -> None:
    model, twin = Model(), Model()
    optimizer, plain = wrapped(model, momentum, stage), wrapped(twin, momentum, 0)
    cases = (0.0, (0, 0.5, 1, 3, -1, math.inf, -math.inf)), (math.inf, (2,)), (math.nan, (-math.inf,))
    for value, orders in cases:  # of one gradient; one of zeros counts, too
        for one, other in ((model, optimizer), (twin, plain)):
            handle = one.first.bias.register_hook(lambda g, value=value: torch.full_like(g, value))
            other.zero_grad()
            loss(one, 0).backward()
            handle.remove()
        plain.synchronize()
        for order, twice in itertools.product(orders, (False, True)):
            ours, theirs = (
                [*one.parameters(), *([one.first.weight, one.first.bias] if twice else [])]
                for one in (model, twin)
            )
            torch.testing.assert_close(
                hc.clip_grad_norm_(ours, 1e9, order),
                nn.utils.clip_grad_norm_(theirs, 1e9, order),
                equal_nan=True,
            )


class Energy(nn.Module):
    """Of all parameters but the last."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(values)

    def forward(self) -> Any:
        return sum((one * one.conj()).sum().abs().double() for one in list(self.all)[:-1])


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "dtypes",
    [
        *("float64", "bfloat16", "float16", "complex64"),
        *("float32 float64", "bfloat16 float16", "complex128 bfloat16"),
    ],
)
def test_a_norm_has_the_dtype_that_torch_gives_it(stage: int, dtypes: str) -> None:
    kinds = [getattr(torch, name) for name in dtypes.split()]

    def backward(shard: int) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(5)
        values = [torch.randn(9, generator=generator).to(kinds[number % len(kinds)]) for number in range(4)]
        model = Energy(values)
        optimizer = wrap(model, momentum(list(model.all)[:3]), shard=shard, bucket_cap_mb=25.0)
        model().backward()
        return list(model.all), optimizer

    (parameters, optimizer), (plain, unsharded) = backward(stage), backward(0)
    unsharded.synchronize()
    tolerance = 1e-2 if any(torch.finfo(kind).bits == 16 for kind in kinds) else 1e-6
    for order in (2.0, math.inf, 0.0):
        theirs = nn.utils.get_total_norm([one.grad for one in plain[:3] if one.grad is not None], order)
        ours = hc.clip_grad_norm_(parameters, 1e9, order)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)
    optimizer.step()
    nothing = hc.clip_grad_norm_(parameters[3:], 1.0)
    assert nothing == 0.0 and nothing.dtype is torch.float32  # as in torch, where there are no gradients


def creep(model: nn.Module, optimizer: Any, count: int = 12) -> dict[str, torch.Tensor]:
    """The weights after updates of 2e-4 to a bias, each of which by itself is lost in bfloat16."""
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(4, 16, dtype=model[0].weight.dtype)).float().sum().backward()
        optimizer.step()
    return whole_weights(model, optimizer)


def creeping(dtype: torch.dtype, stage: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).to(dtype)
    optimizer = wrapped(model, lambda parameters: torch.optim.SGD(parameters, lr=5e-5), stage, **options)
    start, end = whole_weights(model, optimizer)["1.bias"], creep(model, optimizer)["1.bias"]
    assert (start.float() - end.float() > 1e-3).all()
    return model, optimizer


def test_half_precision_weights_follow_float32_masters() -> None:
    ends = []
    for stage in STAGES:
        model, optimizer = creeping(torch.bfloat16, stage)
        ends.append(whole_weights(model, optimizer))
        assert set(optimizer.state_dict()["master_weights"]) == set(range(len(optimizer.pieces)))
        assert all(piece.parameter.dtype is torch.float32 for piece in optimizer.pieces)
        with optimizer.gathered_parameters():  # what is written from outside counts
            model[0].weight.data.fill_(2.0)
        assert creep(model, optimizer, 1)["0.weight"].float().mean() > 1.9
    assert_same(ends[1], ends[2])
    optimizer = wrapped(nn.Linear(4, 4).to(torch.bfloat16), momentum, 2, master_weights=False)
    assert "master_weights" not in optimizer.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_wire_format_of_weights_does_not_round_the_kept_weights(stage: int) -> None:
    creeping(torch.float32, stage, wire={"parameters": "bf16"})


# -------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(("make", "stage"), [(adam, 1), (torch.optim.Adagrad, 2), (adam, 3)])
def test_a_state_from_before_is_taken_along(make: Make, stage: int) -> None:
    """Schedules, too."""
    ends = []
    for each in (stage, 0):
        model = Model()
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
        bare = make(model.parameters())
        loss(model, 9, 0).backward()
        bare.step()
        bare.zero_grad()
        schedule = torch.optim.lr_scheduler.StepLR(bare, 1, gamma=0.5)
        optimizer = wrapped(model, lambda _, bare=bare: bare, each)
        for number in range(3):
            train(model, optimizer, range(number, number + 1))
            schedule.step()
        ends.append((whole_weights(model, optimizer), optimizer.param_groups[0]["lr"]))
    assert_same(ends[0], ends[1], rounding())


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_that_one_rank_alone_has_before_is_an_error_on_every_rank(stage: int) -> None:
    model = Model()
    bare = momentum(model.parameters())
    if hc.rank() == 0:
        loss(model, 0).backward()
        bare.step()
        bare.zero_grad()
    with pytest.raises(ValueError, match=r"has a state.*load it on every rank.*True on rank 0 and False on"):
        hc.DistributedOptimizer(bare, model.named_parameters(), shard=stage, model=model)
    bare.state.clear()
    train(model, wrapped(model, momentum, stage), range(1))


def moved(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "pieces": [[name, start + 1, stop + 1] for name, start, stop in part["pieces"]]}


def test_states_of_other_parts_are_refused() -> None:
    model = Model()
    optimizer = wrapped(model, adam, 2)
    train(model, optimizer, range(1))
    part = optimizer.state_dict()
    refused = [{**part, "pieces": [["elsewhere", 0, 1]]}, moved(part)]
    if hc.size() > 1:
        refused.append(hc.broadcast_object(part, 0, name="part"))  # on rank 0, whose part it is, too
    for state in refused:
        with pytest.raises(ValueError, match="full_state_dict"):
            optimizer.load_state_dict(state)
    whole: Any = optimizer.full_state_dict(all_ranks=True)
    whole["state"][0]["exp_avg"] = whole["state"][0]["exp_avg"][1:]
    with pytest.raises(ValueError, match="elements and not"):
        optimizer.load_state_dict(whole)


# -------------------------------------------------------------------------------------- what cannot be sharded


class Own(torch.optim.SGD):
    """An optimizer from elsewhere."""


UNSHARDABLE: list[tuple[str, dict[str, Any]]] = [
    ("give model=model", {"shard": 3, "model": None, "named": list}),
    ("LBFGS", {"shard": 1, "make": torch.optim.LBFGS}),
    ("elementwise=True", {"shard": 1, "make": Own}),
    *(("shard must be one of", {"shard": shard}) for shard in ("zero", 4, "4")),
    ("use Average or Sum", {"shard": 1, "op": hc.Max}),
    ("needs shard", {"offload": "optimizer"}),
    ("needs shard", {"wire": "int8"}),
    ("wire", {"shard": 2, "wire": "fp7"}),
    ("give 'int8' for parameters", {"shard": 3, "wire": {"parameters": "int4"}}),
    ("offload must be None, 'optimizer' or 'parameters'", {"shard": 2, "offload": "weights"}),
    ("needs shard parameters", {"shard": 2, "offload": "parameters"}),
    ("use wire instead", {"shard": 2, "compression": hc.Compression.fp16}),
    ("use compression", {"shard": 1, "wire": {"gradients": "fp16"}}),
]


def test_unshardable_configurations_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)

    def refused(match: str, make: Make = adam, named: Any = iter, **options: Any) -> None:
        options = {"model": model, **options}
        with pytest.raises(ValueError, match=match):
            distribute(make(model.parameters()), named(model.named_parameters()), **options)

    for match, options in UNSHARDABLE:
        refused(match, **options)
    if hc.size() > 1:
        refused("shard differs between ranks", shard=1 + hc.rank() % 2)
        units = [model, nn.Linear(1, 1)][: 1 + hc.rank() % 2]
        refused("is not part of this Linear", shard=3, units=units)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    refused("elastic", shard=1)
    monkeypatch.delenv("HOROVOD_ELASTIC")
    optimizer = wrapped(model, adam, 1)
    with pytest.raises(ValueError, match="join"):
        hc.join()
    with pytest.raises(ValueError, match="already"):
        optimizer.add_param_group({"params": [model.weight]})


@pytest.mark.ranks(gloo=(3,))
def test_a_process_set_shards_among_its_ranks() -> None:
    members = hc.add_process_set(range(1, hc.size()))
    try:
        model = nn.Linear(6, 6)
        optimizer = wrap(model, shard=2, process_set=members, bucket_cap_mb=25.0)
        model(torch.full((2, 6), float(hc.rank()))).sum().backward()
        optimizer.step()
        values = hc.allgather_object([value.tolist() for value in model.state_dict().values()], name="set")
        assert all(value == values[1] for value in values[1:])
        assert (getattr(optimizer, "shard_stage", 0) == 2) == members.included()
    finally:
        hc.remove_process_set(members)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_share_memory_or_have_none_are_refused(stage: int) -> None:
    for parts in (("weight", "weight"), ("weight", "bias"), ("bias", "weight")):
        model = Model()
        for block, name in zip(model.blocks, parts):  # the first two
            memory = model.blocks[3][0].weight.data
            setattr(block[0], name, nn.Parameter(memory[:, 1:5] if name == "weight" else memory[0]))
        with pytest.raises(ValueError, match=r"'blocks\.\S+' and '\S+' are two that share memory.*clone\(\)"):
            wrapped(model, adam, stage)
    model = Model()
    model.head = nn.Parameter(model.unused.weight.data, requires_grad=False)  # which is in no optimizer
    with pytest.raises(ValueError, match="share memory"):
        wrapped(model, lambda parameters: adam([one for one in parameters if one.requires_grad]), stage)
    for empty, what in (
        (nn.LazyLinear(3), "is lazy"),
        (nn.Linear(2, 3, device="meta"), "is on the meta device"),
    ):
        with pytest.raises(ValueError, match=f"'weight' has no values yet: it {what}"):
            wrapped(empty, momentum, stage)
    hc.barrier()


# -------------------------------------------------------------------------------------- unshard() and autocast


@pytest.mark.parametrize("stage", STAGES)
def test_another_optimizer_goes_on_once_parameters_are_whole_again(stage: int) -> None:
    """At another stage, with the state of the first one."""
    plain = Model()
    whole = wrapped(plain, adam, 0)
    train(plain, whole, range(4))
    reference = whole_weights(plain, whole)
    model = Model()
    optimizer = wrapped(model, adam, stage)
    train(model, optimizer, range(2))
    state = optimizer.full_state_dict(all_ranks=True)
    loss(model, 9).backward()  # nothing comes of it
    old = loss(model, 9)
    if stage == 3:
        for other in range(4):
            with pytest.raises(ValueError, match=r"'first\.weight' is split .* call optimizer\.unshard\(\)"):
                wrapped(model, adam, other)
        with optimizer.gathered_parameters(), pytest.raises(RuntimeError, match=r"unshard\(\) does not work"):
            optimizer.unshard()
        with pytest.raises(ValueError, match=r"'first\.weight', which is split.* leave this call out"):
            hc.broadcast_parameters(model.named_parameters(), root_rank=0)
        with optimizer.gathered_parameters():
            hc.broadcast_parameters(model.state_dict(), root_rank=0)
    reducer = weakref.ref(optimizer.reducer) if optimizer.reducer is not None else lambda: None
    optimizer.unshard()
    assert reducer() is None  # so it counts no gradient of the next one
    if stage == 3:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
    model.zero_grad()
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    for used in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.unshard):
        with pytest.raises(RuntimeError, match=r"given the model its parameters back in unshard\(\)"):
            used()

    again = wrapped(model, adam, stage % 3 + 1)
    again.load_state_dict(state)
    train(model, again, range(2, 4))
    again.unshard()
    assert_same({name: one.detach() for name, one in model.named_parameters()}, reference, rounding())
    first, _ = wrapped(model, adam, 1), wrapped(model, adam, 3)
    several, alone = "made over it last", "by another DistributedOptimizer, which alone can step"
    with pytest.raises(RuntimeError, match=several if hc.size() > 1 else alone):
        first.step()


def test_autocast_keeps_no_copies_of_whole_parameters() -> None:
    """Its cache would: of every unit that has run, until autocast ends."""
    width, count = 128, 16
    blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(count)]
    model = hc.CheckpointSequential(nn.Sequential(*blocks), segments=count)
    wrapped(model, momentum, 3)

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, width))

    forward()
    cast = 2 * width * width
    assert hc.measure_peak(forward).peak_bytes < count * cast
