"""Tests of weight consistency: different weights are found bit for bit, and the error names the first parameter and the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def build() -> nn.Module:
    """All kinds of parameters: frozen, tied, bfloat16, complex, without a dimension or an element, strided; and a buffer."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    model.register_parameter("halves", nn.Parameter(torch.randn(7).bfloat16()))
    model.register_parameter("complex", nn.Parameter(torch.randn(2, dtype=torch.complex64)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("strided", nn.Parameter(torch.randn(6, 4).t()[::2]))
    return model


def message_of(model: nn.Module) -> str:
    with pytest.raises(hc.WeightsDiffer) as caught:
        hc.verify(model)
    assert set(hc.allgather_object(str(caught.value), name="test.message")) == {str(caught.value)}
    return str(caught.value)


def test_equal_weights_pass_whatever_the_buffers_and_the_strides_are() -> None:
    model = build()
    model[1].running_mean.fill_(hc.rank())
    if hc.rank() == 0:
        model.strided.data = model.strided.data.contiguous()
    hc.verify(model)
    hc.verify(nn.ReLU())
    with torch.no_grad():
        model.scalar.fill_(float("nan"))
    hc.verify(model)


@several
@pytest.mark.parametrize("name", ["0.bias", "2.weight", "halves", "strided"])
def test_the_first_parameter_that_differs_is_named_with_the_ranks(name: str) -> None:
    model = build()
    last = hc.size() - 1
    if hc.rank() == last:
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
            model[3].bias.add_(1 if name == "0.bias" else 0)
    message = message_of(model)
    assert f"parameter '{name}' differs: rank {last} (host " in message
    among = {2: "rank 0", 4: "ranks 0-2"}[hc.size()]
    assert f"has other values than {among} ({2 if name == '0.bias' else 1} parameters differ)" in message


@several
@pytest.mark.parametrize(
    "bits", [(0, -(2**31)), (0x7FC00000, 0x7FC00001)], ids=["signed zero", "nan payload"]
)
def test_values_are_compared_by_their_bits(bits: tuple[int, int]) -> None:
    model = nn.Linear(1, 1)
    model.weight.data = torch.tensor([[bits[hc.rank() > 0]]], dtype=torch.int32).view(torch.float32)
    assert "parameter 'weight' differs" in message_of(model)


@several
@pytest.mark.parametrize(
    ("build_other", "expected"),
    [
        (lambda: nn.Linear(3, 4), ["shape of parameter 'weight'", "(2, 3)", "(4, 3)"]),
        (lambda: nn.Linear(3, 2).double(), ["dtype of parameter 'weight'", "float32", "float64"]),
        (lambda: nn.ParameterDict({"other": torch.ones(2, 3)}), ["name of parameter 'weight'", "other"]),
        (lambda: nn.Linear(3, 2, bias=False), ["numbers of parameters: 2 on rank 0 (host ", "1 on rank"]),
    ],
    ids=["shape", "dtype", "name", "number"],
)
def test_models_that_differ_are_found(build_other: Callable[[], nn.Module], expected: list[str]) -> None:
    model = nn.Linear(3, 2) if hc.rank() < hc.size() - 1 else build_other()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    message = message_of(model)
    assert all(words in message for words in expected), message


def test_what_cannot_be_compared_is_an_error_on_every_rank() -> None:
    model = nn.LazyLinear(2) if hc.rank() == 0 else nn.Linear(1, 2)
    with pytest.raises(ValueError, match=r"rank 0 \(host .*\): the weights of 'weight' cannot be compared"):
        hc.verify(model)


@several
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
