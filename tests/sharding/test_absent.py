"""Tests of split parameters outside of their module: metadata is available, and any use of values is a helpful error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import wrap
from same import assert_same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

GATHERED = r"optimizer\.gathered_parameters\(\)"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.fixture
def split() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    return model, wrap(model, shard=3)


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# More: tests/differential/hand.py
USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: sum(one.norm() for one in model.parameters()),
    "detach": lambda model: [one.detach() for one in model.parameters()],
    "data": lambda model: [one.data for one in model.parameters()],
    "numpy": lambda model: [one.numpy(force=True) for one in model.parameters()],
    "item": lambda model: model[1].factor.item(),
    "comparison": lambda model: torch.equal(model[0].weight, model[2].weight),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "one element written": lambda model: model[1].factor.data.fill_(0.0),
    "written": lambda model: nn.init.ones_(model[0].weight),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "from a vector": lambda model: nn.utils.vector_to_parameters(torch.ones(41), model.parameters()),
    "converted": lambda model: model.double(),
    "moved": lambda model: model.to("meta"),
    "copied": copy.deepcopy,
    "one copied": lambda model: copy.deepcopy(model[0].weight),
    "pickled": pickle.dumps,
    "saved": lambda model: torch.save(model, io.BytesIO()),
    "state": lambda model: model.state_dict(),
    "state of a part": lambda model: model[0].state_dict(),
    "loaded": lambda model: model.load_state_dict({}),
    "saved parameter": lambda model: torch.save(model[0].weight, io.BytesIO()),
    "averaged": AveragedModel,
}


def test_reading_or_writing_values_is_an_error_that_says_what_to_do() -> None:
    """Also for an average that was made before, which would be nan."""
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = wrap(model, shard=3)
    for _ in range(2):
        train(model, optimizer)
        for name, use in {**USES, "averaged once more": average.update_parameters}.items():
            with pytest.raises(RuntimeError, match=rf"split over the ranks.*{GATHERED}"):
                print(name, use(model))
        with pytest.raises(RuntimeError, match=r"parameter '1\.factor'"):
            model[1].factor.mul(2)
        with optimizer.gathered_parameters():
            average.update_parameters(model)
    assert all(one.isfinite().all() for one in average.parameters())


def test_within_gathered_parameters_a_model_is_as_without_shards(split: tuple[Any, Any]) -> None:
    """It is read, copied, written and run; other data, and another dtype, are refused."""
    model, optimizer = split
    x, weight = torch.ones(2, 4), model[0].weight
    train(model, optimizer)
    with torch.no_grad():
        wanted = model(x)
    with optimizer.gathered_parameters():
        assert USES["norm"](model) > 0 and type(weight) is nn.Parameter
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(model(x), wanted)
        state = {name: value / 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        model[2].bias.data = torch.ones(4)
    for twin in twins:
        assert all(type(one) is nn.Parameter for one in twin.parameters())
        twin(x).sum().backward()
        assert torch.equal(twin(x), wanted)
    twins[0].load_state_dict(state)
    twins[0][2].bias.data.fill_(1)
    assert torch.equal(model(x), twins[0](x))

    with pytest.raises(RuntimeError, match="has become torch.float64"), optimizer.gathered_parameters():
        model.double()
    optimizer.full_state_dict()
    weight.data = torch.zeros_like(weight)
    for use in (optimizer.full_state_dict, lambda: model(x)):
        with pytest.raises(RuntimeError, match=r"'0\.weight' was given data outside"):
            use()
    optimizer.unshard()
    assert torch.equal(model(x), twins[0](x)) and torch.equal(copy.deepcopy(model)(x), model(x))
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_whole_state_of_the_model_is_one_call_and_memory_of_its_own(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scale(), nn.Linear(4, 4))
    model[3].weight = model[0].weight  # tied
    optimizer = wrap(model, shard=stage)
    train(model, optimizer)
    state = optimizer.full_model_state_dict(model)
    assert (state is None) == (hc.rank() > 0)
    if stage == 3:
        assert {one.untyped_storage().nbytes() for one in model.parameters()} == {4}
    copies = [optimizer.full_model_state_dict(model, all_ranks=True)]
    with optimizer.gathered_parameters():
        copies.append(optimizer.full_model_state_dict(model, all_ranks=True))
        wanted = copy.deepcopy(model.state_dict())
    train(model, optimizer)  # changes none of the copies
    for found in copies if state is None else [*copies, state]:
        assert_same(dict(found), dict(wanted))
        assert found["0.weight"].data_ptr() == found["3.weight"].data_ptr()
    with optimizer.gathered_parameters():
        assert not torch.equal(wanted["0.weight"], model[0].weight)
        model.load_state_dict(copies[0])
    assert_same(dict(optimizer.full_model_state_dict(model, all_ranks=True)), dict(wanted))
    model[2].register_forward_hook(lambda *_: optimizer.full_model_state_dict(model))
    if stage == 3:
        with pytest.raises(RuntimeError, match="inside a forward or backward pass"):
            model(torch.ones(2, 4))


def test_what_needs_no_values_works(split: tuple[Any, Any]) -> None:
    model, optimizer = split
    weight, seen = model[0].weight, []
    handle = weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.shape))
    assert isinstance(weight, nn.Parameter) and weight.shape == (4, 4) and weight.dim() == 2
    assert weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.grad is None
    assert weight.is_leaf and weight.requires_grad and weight.numel() == len(weight) * 4 == 16
    assert "0.weight" in repr(weight) and "0.weight" in f"{weight}"
    assert torch.zeros_like(weight).sum() == 0 and weight.new_ones(2).sum() == 2
    assert model.to("cpu") is model and model.float() is model
    assert torch.equal(weight, weight) and not torch.equal(weight, model[0].bias)
    assert {weight: 1}[weight] == 1 and sum(one.numel() for one in model.parameters()) == 41
    train(model, optimizer)
    model.requires_grad_(False)
    model.requires_grad_(True)
    assert seen == [(4, 4)]
    handle.remove()
    hc.verify(model)
