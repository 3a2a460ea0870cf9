"""Tests of drifting weights: the control flags of a later step tell every rank the parameter and the last equal step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_process import chain, loss, raises_everywhere, sgd, train, wrap
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.reduction import weights
from hvd_ckpt.reduction.weights import Sums

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
LAST = -1


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several parts for one weight of a chain, and one part for several of its biases."""
    monkeypatch.setattr(weights, "PART_BYTES", 100)
    monkeypatch.setattr(weights, "PARTS", 1 << 20)
    yield
    hc.verify(weights=True)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    train(model, optimizer, range(number, number + 1))


def parts_of(model: nn.Module) -> int:
    """At least as many steps as there are parts."""
    return sum(parameter.nbytes for parameter in model.parameters()) // 100 + 2


@torch.no_grad()
def change(tensor: torch.Tensor, element: int = 0) -> None:
    """Changes the lowest bits of an element, on the last rank."""
    if hc.rank() == hc.size() - 1:
        if not tensor.is_contiguous():
            tensor[tuple(0 for _ in tensor.shape)] *= 1.5
        else:
            tensor.view(-1).view(torch.uint8)[element * tensor.element_size()] += 1


def told(model: nn.Module, optimizer: Any, steps: int, first: int = 100) -> str:
    """The error within so many steps on this rank."""
    for number in range(first, first + steps):
        try:
            step(model, optimizer, number)
        except hc.WeightsDiffer as error:
            return str(error)
    return ""


def found(model: nn.Module, optimizer: Any, steps: int, first: int = 100) -> str:
    """The error within so many steps, the same on every rank."""
    message = told(model, optimizer, steps, first)
    assert set(hc.allgather_object(message, name="test.message")) == {message}
    return message


class Kinds(nn.Module):
    """Parameters of several dtypes and layouts, one that is not used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.table = nn.Embedding(10, 6, sparse=True)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(6, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.float().view(4, 2, 4, 1).expand(4, 2, 4, 4).repeat(1, 2, 1, 1)).mean((2, 3))
        y = y + self.table(torch.arange(4)) * self.scale.float()
        return self.frozen(y) * self.narrow.float().sum()


@several
@pytest.mark.parametrize("name", ["0.0.weight", "2.0.bias", "3.0.bias"])
def test_a_changed_bit_in_each_parameter_is_an_error_on_every_rank(name: str) -> None:
    model = chain()
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    assert not found(model, optimizer, 2 * parts_of(model), 10)
    parameter = model.get_parameter(name)
    change(parameter, parameter.numel() - 1)
    message = found(model, optimizer, parts_of(model))
    among = "rank 0" if hc.size() == 2 else f"ranks 0-{hc.size() - 2}"
    assert f"parameter '{name}' differs in step " in message, message
    assert f"rank {hc.size() - 1} (host " in message and f"other values than {among} (1 parameters" in message
    now, before = map(int, re.findall(r"in step (\d+)", message))
    assert before <= 3 + 2 * parts_of(model) < now <= before + parts_of(model)


@several
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_options_of_one_rank_are_an_error_on_every_rank(stage: int, before: int) -> None:
    """Where each rank steps a shard, no weights would show them."""
    for name, value, said in ("lr", 0.25, "0.1, and 0.25"), ("nesterov", True, ""), ("momentum", None, ""):
        model = chain()
        optimizer = wrap(model, shard=stage)
        train(model, optimizer, range(before))
        if hc.rank() == hc.size() - 1:
            optimizer.param_groups[0][name] = value
        message = found(model, optimizer, 1)
        assert message.startswith(f"param_groups[0]['{name}'] differs between ranks") and said in message
    model = chain()
    optimizer = wrap(model, shard=stage)
    train(model, optimizer, range(before))

    def clipped(*limits: float) -> None:
        optimizer.zero_grad()
        loss(model, 9).backward()
        for limit in limits:
            hc.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

    clipped(0.5)
    clipped(0.5, 1.0)
    is_last = hc.rank() == hc.size() - 1
    for limits in ((0.5,) if is_last else (0.4,)), ((0.5,) if is_last else ()):
        raises_everywhere(
            hc.WeightsDiffer, "max_norm of clip_grad_norm_", lambda limits=limits: clipped(*limits)
        )


@several
def test_a_default_that_loading_adds_on_one_rank_is_no_other_option() -> None:
    model = chain()
    optimizer = wrap(model, torch.optim.Adafactor(model.parameters(), lr=0.01))
    train(model, optimizer, range(3))
    if hc.rank() == hc.size() - 1:
        optimizer.load_state_dict(optimizer.state_dict())
    assert not found(model, optimizer, 3, 10)


@several
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [{}, {"wire": {"parameters": "bf16"}}, {"offload": "optimizer"}], ids=str)
def test_values_that_steps_mix_into_those_of_all_ranks(stage: int, options: dict[str, Any]) -> None:
    """Each rank updates a part of the weights, so what one has written is soon gone or everywhere."""
    for name in ("0.0.weight", "3.0.bias"):
        model = chain()
        optimizer = wrap(model, shard=stage, **options)
        train(model, optimizer, range(3))
        assert not found(model, optimizer, 3, 10)
        if hc.rank() == hc.size() - 1:
            model.get_parameter(name).data.mul_(1.5)
        message = found(model, optimizer, 3)
        among = "rank 0" if hc.size() == 2 else f"ranks 0-{hc.size() - 2}"
        assert f"parameter '{name}' differs in step " in message, message
        assert f"rank {hc.size() - 1} (host " in message and f"other values than {among}" in message


@several
@pytest.mark.parametrize("name", ["conv.weight", "conv.bias", "narrow", "scale", "table.weight"])
def test_all_kinds_of_parameters_are_compared(name: str) -> None:
    model = Kinds()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    if hc.rank() == 0:  # not reduced: may be a rank's own
        nn.init.ones_(model.unused.weight)
        nn.init.ones_(model.frozen.bias)
    train(model, optimizer, range(3))
    assert not found(model, optimizer, 2 * parts_of(model), 10)
    change(model.get_parameter(name))
    assert f"parameter '{name}' differs" in found(model, optimizer, parts_of(model))


@several
@pytest.mark.parametrize(
    "options",
    [
        {"op": hc.Sum},
        {"op": hc.Max},
        {"gradient_predivide_factor": 3.0},
        {"compression": hc.Compression.fp16},
        {"groups": 2},
        {"keep_buckets": False},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_with_every_way_in_which_flags_travel(options: dict[str, Any]) -> None:
    model = chain(2)
    optimizer = wrap(model, **options)
    train(model, optimizer, range(3))
    assert not found(model, optimizer, 2 * parts_of(model), 10)
    change(model[1][0].weight)
    assert "parameter '1.0.weight' differs" in found(model, optimizer, parts_of(model))


@several
def test_after_an_error_a_broadcast_mends_and_training_resumes() -> None:
    model = chain(2)
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    change(model[0][0].bias)
    assert "'0.0.bias'" in found(model, optimizer, parts_of(model))
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not found(model, optimizer, 2 * parts_of(model))
    hc.verify(model)


@several
def test_weights_may_be_broadcast_after_the_first_step() -> None:
    model = chain(2)
    optimizer = wrap(model)
    nn.init.normal_(model[0][0].weight, std=1.0 + hc.rank())
    step(model, optimizer, 0)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not found(model, optimizer, 2 * parts_of(model))


@several
def test_what_a_rank_declares_its_own_is_not_compared() -> None:
    model = chain(2)
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    hc.verify(weights=True, ignore=[model[0][0].weight] if hc.rank() else list(model[0][0].parameters()))
    change(model[0][0].weight)
    change(model[0][0].bias)  # rank 0 ignores it, and none can be compared with it
    assert not found(model, optimizer, 2 * parts_of(model))
    change(model[1][0].weight)
    message = found(model, optimizer, parts_of(model))
    assert "'1.0.weight'" in message and "(1 parameters" in message
    hc.verify(weights=True)
    optimizer.reset_reduction()
    assert "'0.0.weight'" in found(model, optimizer, 2 + parts_of(model))
    with pytest.raises(TypeError, match="Linear"):
        hc.verify(weights=True, ignore=[model[0][0]])


@several
def test_turned_off_on_all_ranks_or_some() -> None:
    model = chain(2)
    optimizer = wrap(model)
    hc.verify(weights=False)
    train(model, optimizer, range(3))
    change(model[0][0].weight)
    assert not found(model, optimizer, 2 * parts_of(model))
    hc.verify(weights=hc.rank() < hc.size() - 1)  # the others have the same
    assert not found(model, optimizer, 2 * parts_of(model))
    hc.verify(weights=True)
    assert "'0.0.weight'" in found(model, optimizer, parts_of(model))


@several
def test_ranks_that_have_joined_are_not_compared() -> None:
    model = chain(2)
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    for epoch in range(3):
        train(model, optimizer, range(10 * epoch, 10 * epoch + 3 + 2 * hc.rank()))
        last = hc.join()
        hc.broadcast_parameters(model.state_dict(), root_rank=last)
        hc.broadcast_optimizer_state(optimizer, root_rank=last)
    assert not found(model, optimizer, 2 * parts_of(model))
    change(model[1][0].weight)
    absent = hc.size() > 2 and hc.rank() == 0  # while the others find it
    message = "" if absent else told(model, optimizer, parts_of(model))
    if hc.size() > 2:
        hc.join()
    assert "'1.0.weight'" in message or absent


@several
def test_ranks_that_step_by_themselves_are_not_compared() -> None:
    model = chain(2)
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    if hc.rank() > 0:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(hc.rank()))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    assert not found(model, optimizer, 2 * parts_of(model))


@several
def test_ranks_at_different_parts_are_levelled() -> None:
    model = chain(2)
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    optimizer.reducer.weights.turn = hc.rank() + 1  # after steps of some ranks alone
    assert not found(model, optimizer, 2 * parts_of(model))
    assert len(set(hc.allgather_object(optimizer.reducer.weights.turn, name="test.turn"))) == 1
    change(model[1][0].weight)
    assert "'1.0.weight'" in found(model, optimizer, parts_of(model))


@pytest.mark.ranks(mpi=(4,))
def test_only_ranks_of_a_process_set_are_compared() -> None:
    members = hc.add_process_set([0, 1])
    model = chain(2)
    nn.init.constant_(model[0][0].bias, float(hc.rank() > 1))
    optimizer = wrap(model, process_set=members)
    train(model, optimizer, range(2 * parts_of(model)))
    if hc.rank() == 1:
        model[1][0].weight.data[0, 0] += 1
    message = told(model, optimizer, parts_of(model))
    assert ("'1.0.weight'" in message) == (hc.rank() < 2)
    hc.remove_process_set(members)


@several
def test_parameters_that_come_later_and_two_optimizers() -> None:
    model, other = chain(3), chain(3)
    late = model[2]
    optimizer = wrap(nn.Sequential(model[0], model[1]))
    second = wrap(other, torch.optim.Adam(other.parameters()))
    for number in range(4):
        step(nn.Sequential(model[0], model[1]), optimizer, number)
        step(other, second, number)
    optimizer.add_param_group({"params": list(late.parameters())})
    assert not found(model, optimizer, 2 * parts_of(model), 10)
    assert not found(other, second, 2 * parts_of(model), 10)
    change(late[0].weight)
    assert "differs" in found(model, optimizer, 1 + parts_of(model))
    assert not found(other, second, parts_of(model))


@pytest.mark.ranks(mpi=(4,))
def test_local_sgd_compares_the_ranks_of_a_group() -> None:
    model = chain(2)
    named = model.named_parameters()
    optimizer = hc.LocalSGD(sgd(model), named_parameters=named, every=1000, within=[[0, 1], [2, 3]])
    train(model, optimizer, range(2 * parts_of(model)))  # between averages groups have weights of their own
    change(model[1][0].weight)
    message = told(model, optimizer, parts_of(model))
    assert ("'1.0.weight' differs" in message and "rank 3 (host" in message) == (hc.rank() > 1)
    optimizer.close()


def test_flags_tell_equal_from_different() -> None:
    values = [0, -1, 1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    for scale in (1.0, 1 / 3, 1 / 16_000):
        for first in values:
            for second in values:
                rows = [None, *[torch.tensor(value) for value in (first, first, second)]]
                summed = torch.stack([Sums.encode(row) for row in rows]).sum(0) * scale
                assert Sums.equal(summed.tolist(), scale) == (first == second)
    nobody = torch.stack([Sums.encode(None)] * 2).sum(0)
    assert Sums.equal(nobody.tolist(), 1.0)


def test_flags_do_not_depend_on_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for value in (None, torch.tensor(7)):
            assert Sums.encode(value).dtype is torch.float32
            assert Sums.encode(value).shape == (Sums.SIZE,)
    finally:
        torch.set_default_dtype(torch.float32)


def test_sums_of_many_ranks_are_exact() -> None:
    ranks = weights.MAX_RANKS
    same, other = Sums.encode(torch.tensor(-1)), Sums.encode(torch.tensor(-2))
    for scale in (1.0, 1 / ranks, 1 / (3 * ranks)):
        total = ((same * ranks).float() * torch.tensor(scale)).tolist()
        assert Sums.equal(total, scale)
        total = ((same * (ranks - 1) + other).float() * torch.tensor(scale)).tolist()
        assert not Sums.equal(total, scale)
