"""Tests of the verification of weights: of all by ``hc.verify``, and of a part of them by the control flags of each step.

Different weights are found bit for bit, and the error names the first parameter and the ranks, in steps also the last equal one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_process import chain, loss, raises_everywhere, sgd, train, trained, wrap
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.reduction import weights
from hvd_ckpt.reduction.weights import Sums

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several parts for one weight of a chain, and one part for several of its biases."""
    monkeypatch.setattr(weights, "PART_BYTES", 100)
    monkeypatch.setattr(weights, "PARTS", 1 << 20)
    yield
    hc.verify(weights=True)


def is_last() -> bool:
    return hc.rank() == hc.size() - 1


def parts_of(model: nn.Module) -> int:
    """At least as many steps as there are parts."""
    return sum(parameter.nbytes for parameter in model.parameters()) // 100 + 2


@torch.no_grad()
def change(tensor: torch.Tensor, element: int = 0) -> None:
    """Changes the lowest bits of an element, or the first element of strided tensors, on the last rank."""
    if is_last():
        if not tensor.is_contiguous():
            tensor[tuple(0 for _ in tensor.shape)] *= 1.5
        else:
            tensor.view(-1).view(torch.uint8)[element * tensor.element_size()] += 1


def told(model: nn.Module, optimizer: Any, steps: int = 0) -> str:
    """The error on this rank within so many steps, by default as many as there are parts."""
    for number in range(100, 100 + (steps or parts_of(model))):
        try:
            train(model, optimizer, range(number, number + 1))
        except hc.WeightsDiffer as error:
            return str(error)
    return ""


def found(model: nn.Module, optimizer: Any, steps: int = 0) -> str:
    """The error of :func:`told`, the same on every rank."""
    message = told(model, optimizer, steps)
    assert set(hc.allgather_object(message, name="test.message")) == {message}
    return message


def finds_nothing(model: nn.Module, optimizer: Any) -> bool:
    """Whether each part was compared twice, and no rank has found a difference."""
    return not found(model, optimizer, 2 * parts_of(model))


def names_the_last_rank(message: str, name: str, number: int | str = r"\d+") -> bool:
    """Whether an error is of this parameter and so many parameters, on the last rank alone."""
    among = "rank 0" if hc.size() == 2 else f"ranks 0-{hc.size() - 2}"
    said = rf"'{name}' differs.*rank {hc.size() - 1} \(host .* has other values than {among} \({number} param"
    return re.search(said, message) is not None


# ---------------------------------------------------------------------------------------------------- hc.verify


def every_kind() -> nn.Module:
    """All kinds of parameters: frozen, tied, bfloat16, complex, nan, without a dimension or an element, strided; and a buffer."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    for name, value in {
        "halves": torch.randn(7).bfloat16(),
        "complex": torch.randn(2, dtype=torch.complex64),
        "zero": torch.tensor(0.0),
        "nan": torch.tensor([float("nan")]),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(6, 4).t()[::2],
    }.items():
        model.register_parameter(name, nn.Parameter(value))
    return model


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
def test_equal_weights_pass_whatever_the_buffers_and_the_strides_are() -> None:
    model = every_kind()
    model[1].running_mean.fill_(hc.rank())
    if hc.rank() == 0:
        model.strided.data = model.strided.data.contiguous()
    hc.verify(model)
    hc.verify(nn.ReLU())


@pytest.mark.parametrize(
    ("name", "change", "number"),
    [
        ("0.bias", lambda model: (model[0].bias.mul_(2), model[3].bias.add_(1)), 2),
        ("2.weight", lambda model: model[2].weight.mul_(2), 1),
        ("halves", lambda model: model.halves.mul_(2), 1),
        ("strided", lambda model: model.strided.mul_(2), 1),
        ("zero", lambda model: model.zero.neg_(), 1),
        ("nan", lambda model: model.nan.view(torch.int32).add_(1), 1),
    ],
)
def test_the_first_parameter_that_differs_is_named_with_the_ranks(
    name: str, change: Callable[[Any], Any], number: int
) -> None:
    """By the bits of its values."""
    model = every_kind()
    if is_last():
        with torch.no_grad():
            change(model)
    message = raises_everywhere(hc.WeightsDiffer, "", lambda: hc.verify(model))
    assert names_the_last_rank(message, name, number), message


@pytest.mark.parametrize(
    ("build_other", "said"),
    [
        (lambda: nn.Linear(3, 4), r"shape of parameter 'weight'.*\(2, 3\).*\(4, 3\)"),
        (lambda: nn.Linear(3, 2).double(), "dtype of parameter 'weight'.*float32.*float64"),
        (lambda: nn.ParameterDict({"other": torch.ones(2, 3)}), "name of parameter 'weight'.*other"),
        (lambda: nn.Linear(3, 2, bias=False), r"numbers of parameters: 2 on rank 0 \(host .*1 on rank"),
    ],
    ids=["shape", "dtype", "name", "number"],
)
def test_models_that_differ_are_found(build_other: Callable[[], nn.Module], said: str) -> None:
    model = build_other() if is_last() else nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    raises_everywhere(hc.WeightsDiffer, said, lambda: hc.verify(model))


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
def test_what_cannot_be_compared_is_an_error_on_every_rank() -> None:
    model = nn.LazyLinear(2) if hc.rank() == 0 else nn.Linear(1, 2)
    with pytest.raises(ValueError, match=r"rank 0 \(host .*\): the weights of 'weight' cannot be compared"):
        hc.verify(model)


def test_a_process_set_compares_its_own_ranks() -> None:
    members = hc.add_process_set([0])
    model = nn.Linear(2, 2)
    if hc.rank() == 0:
        model.weight.data.add_(1)
        hc.verify(model, process_set=members)
    else:
        with pytest.raises(ValueError, match=f"rank {hc.rank()} is not in "):
            hc.verify(model, process_set=members)
    hc.remove_process_set(members)


# ---------------------------------------------------------------------------------------------------- in steps


class Kinds(nn.Module):
    """Parameters of several dtypes and layouts; one that is not used, and one that is frozen, which may be a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.table = nn.Embedding(10, 6, sparse=True)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(6, 1)
        self.frozen.requires_grad_(False)
        if hc.rank() == 0:
            nn.init.ones_(self.unused.weight)
            nn.init.ones_(self.frozen.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.float().view(4, 2, 4, 1).expand(4, 2, 4, 4).repeat(1, 2, 1, 1)).mean((2, 3))
        y = y + self.table(torch.arange(4)) * self.scale.float()
        return self.frozen(y) * self.narrow.float().sum()


WAYS: list[dict[str, Any]] = [  # in which flags travel
    {"op": hc.Sum},
    {"op": hc.Max},
    {"gradient_predivide_factor": 3.0},
    {"compression": hc.Compression.fp16},
    {"groups": 2},
    {"keep_buckets": False},
]


@pytest.mark.parametrize(
    ("build", "name", "options"),
    [
        *((chain, name, {}) for name in ("0.0.weight", "2.0.bias", "3.0.bias")),
        *((Kinds, name, {}) for name in ("conv.weight", "conv.bias", "narrow", "scale", "table.weight")),
        *((chain, "1.0.weight", options) for options in WAYS),
    ],
)
def test_a_changed_bit_in_each_parameter_is_an_error_on_every_rank(
    build: Callable[[], nn.Module], name: str, options: dict[str, Any]
) -> None:
    model = build()
    model, optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=1e-4), **options)
    assert finds_nothing(model, optimizer)
    change(model.get_parameter(name), 0 if options else -1)
    message = found(model, optimizer)
    assert names_the_last_rank(message, name, 1), message
    now, before = map(int, re.findall(r"in step (\d+)", message))
    assert before <= 3 + 2 * parts_of(model) < now <= before + parts_of(model)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [{}, {"wire": {"parameters": "bf16"}}, {"offload": "optimizer"}], ids=str)
def test_values_that_steps_mix_into_those_of_all_ranks(stage: int, options: dict[str, Any]) -> None:
    """Each rank updates a part of the weights, so what one has written is soon gone or everywhere."""
    for name in ("0.0.weight", "3.0.bias"):
        model, optimizer = trained(chain(), shard=stage, **options)
        assert not found(model, optimizer, 3)
        if is_last():
            model.get_parameter(name).data.mul_(1.5)
        assert names_the_last_rank(found(model, optimizer, 3), name)


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_options_of_one_rank_are_an_error_on_every_rank(stage: int, before: int) -> None:
    """Where each rank steps a shard, no weights would show them."""
    for name, value, said in ("lr", 0.25, "0.1, and 0.25"), ("nesterov", True, ""), ("momentum", None, ""):
        model, optimizer = trained(chain(), steps=before, shard=stage)
        if is_last():
            optimizer.param_groups[0][name] = value
        message = found(model, optimizer, 1)
        assert message.startswith(f"param_groups[0]['{name}'] differs between ranks") and said in message
    model, optimizer = trained(chain(), steps=before, shard=stage)

    def clipped(*limits: float) -> None:
        optimizer.zero_grad()
        loss(model, 9).backward()
        for limit in limits:
            hc.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

    clipped(0.5)
    clipped(0.5, 1.0)
    for limits in ((0.5,) if is_last() else (0.4,)), ((0.5,) if is_last() else ()):
        raises_everywhere(
            hc.WeightsDiffer, "max_norm of clip_grad_norm_", lambda limits=limits: clipped(*limits)
        )


def test_a_default_that_loading_adds_on_one_rank_is_no_other_option() -> None:
    model = chain()
    model, optimizer = trained(model, torch.optim.Adafactor(model.parameters(), lr=0.01))
    if is_last():
        optimizer.load_state_dict(optimizer.state_dict())
    assert not found(model, optimizer, 3)


def test_a_broadcast_mends_after_the_first_step_and_after_an_error() -> None:
    model = chain(2)
    nn.init.normal_(model[0][0].weight, std=1.0 + hc.rank())
    model, optimizer = trained(model, steps=1)  # which compares nothing
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    assert finds_nothing(model, optimizer)
    change(model[0][0].bias)
    assert "'0.0.bias'" in found(model, optimizer)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    assert finds_nothing(model, optimizer)
    hc.verify(model)


# ---------------------------------------------------------------------------------------------------- what is compared


def test_what_a_rank_declares_its_own_is_not_compared() -> None:
    model, optimizer = trained(chain(2))
    hc.verify(weights=True, ignore=[model[0][0].weight] if hc.rank() else list(model[0][0].parameters()))
    change(model[0][0].weight)
    change(model[0][0].bias)  # rank 0 ignores it, and none can be compared with it
    assert finds_nothing(model, optimizer)
    change(model[1][0].weight)
    message = found(model, optimizer)
    assert "'1.0.weight'" in message and "(1 parameters" in message
    hc.verify(weights=True)
    optimizer.reset_reduction()
    assert "'0.0.weight'" in found(model, optimizer, 2 + parts_of(model))
    with pytest.raises(TypeError, match="Linear"):
        hc.verify(weights=True, ignore=[model[0][0]])


def test_turned_off_on_all_ranks_or_some() -> None:
    hc.verify(weights=False)
    model, optimizer = trained(chain(2))
    change(model[0][0].weight)
    assert finds_nothing(model, optimizer)
    hc.verify(weights=not is_last())  # the others have the same
    assert finds_nothing(model, optimizer)
    hc.verify(weights=True)
    assert "'0.0.weight'" in found(model, optimizer)


def test_ranks_that_have_joined_are_not_compared() -> None:
    model, optimizer = trained(chain(2))
    for epoch in range(3):
        train(model, optimizer, range(10 * epoch, 10 * epoch + 3 + 2 * hc.rank()))
        last = hc.join()
        hc.broadcast_parameters(model.state_dict(), root_rank=last)
        hc.broadcast_optimizer_state(optimizer, root_rank=last)
    assert finds_nothing(model, optimizer)
    change(model[1][0].weight)
    absent = hc.size() > 2 and hc.rank() == 0  # while the others find it
    message = "" if absent else told(model, optimizer)
    if hc.size() > 2:
        hc.join()
    assert "'1.0.weight'" in message or absent


def test_ranks_that_step_by_themselves_are_not_compared() -> None:
    model, optimizer = trained(chain(2))
    optimizer.zero_grad()
    if hc.rank() > 0:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(hc.rank()))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    assert finds_nothing(model, optimizer)


def test_ranks_at_different_parts_are_levelled() -> None:
    model, optimizer = trained(chain(2))
    optimizer.reducer.weights.turn = hc.rank() + 1  # after steps of some ranks alone
    assert finds_nothing(model, optimizer)
    assert len(set(hc.allgather_object(optimizer.reducer.weights.turn, name="test.turn"))) == 1
    change(model[1][0].weight)
    assert "'1.0.weight'" in found(model, optimizer)


@pytest.mark.ranks(mpi=(4,))
@pytest.mark.parametrize("local", [False, True], ids=["process set", "local SGD"])
def test_only_ranks_that_reduce_together_are_compared(local: bool) -> None:
    pair = hc.add_process_set([2, 3])
    model = chain(2)
    if local:
        within = [[0, 1], [2, 3]]
        named = model.named_parameters()
        optimizer = hc.LocalSGD(sgd(model), named_parameters=named, every=1000, within=within)
    else:
        nn.init.constant_(model[0][0].bias, float(hc.rank() > 1))
        optimizer = wrap(model, process_set=pair)
    train(model, optimizer, range(2 * parts_of(model)))  # those of other ranks are others by now
    change(model[1][0].weight)
    message = told(model, optimizer)
    assert ("'1.0.weight' differs" in message and "rank 3 (host" in message) == (hc.rank() > 1)
    if local:
        optimizer.close()
    hc.remove_process_set(pair)


def test_parameters_that_come_later_and_two_optimizers() -> None:
    model = chain(3)
    used = model[:2]
    used, optimizer = trained(used)
    other = chain(3)
    other, second = trained(other, torch.optim.Adam(other.parameters()))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert finds_nothing(model, optimizer)
    assert finds_nothing(other, second)
    change(model[2][0].weight)
    assert "differs" in found(model, optimizer, 1 + parts_of(model))
    assert not found(other, second)


def test_sums_of_many_ranks_are_exact() -> None:
    ranks = weights.MAX_RANKS
    same, other = Sums.encode(torch.tensor(-1)), Sums.encode(torch.tensor(-2))
    for scale in (1.0, 1 / ranks, 1 / (3 * ranks)):
        for sums, equal in ((same * ranks, True), (same * (ranks - 1) + other, False)):
            assert Sums.equal((sums * torch.tensor(scale)).tolist(), scale) is equal
