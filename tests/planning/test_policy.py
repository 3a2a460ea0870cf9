"""Tests of modules with a checkpoint policy: class, parameters, copies, files and results stay the same."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from residual import Residual
from same import assert_same, gradients
from selective import drop_all
from torch import nn

from hvd_ckpt.planning.policy import (
    KEEP,
    CheckpointPolicy,
    apply_policy,
    apply_to_chain,
    base_class,
    remove_policy,
)

RECOMPUTE = CheckpointPolicy("recompute", recompute=True)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Block(Residual):
    """A block with arguments by name, random numbers, and something that cannot be pickled."""

    def __init__(self):
        super().__init__(8)
        self.log = open("/dev/null")  # noqa: SIM115

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "log"}


def dropping(function, x):
    return CheckpointPolicy("drop all", drop_all(function, x))


def train(model, x):
    model.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *gradients(model)]


@pytest.mark.parametrize("recompute", [False, True], ids=["policy", "recompute"])
def test_module_with_a_policy_is_still_itself(recompute):
    block, x = Block(), torch.randn(4, 8)
    expected, shown, keys = train(block, x), repr(block), list(block.state_dict())
    apply_policy(block, RECOMPUTE if recompute else dropping(block, x))
    assert isinstance(block, Block) and type(block) is not Block and base_class(block) is Block
    assert (type(block).__name__, repr(block), list(block.state_dict())) == ("Block", shown, keys)
    assert_same(expected, train(block, x))
    assert torch.equal(block.eval()(x, scale=2.0), Block.forward(block, x, scale=2.0))
    for _ in range(2):
        remove_policy(block)
        assert type(block) is Block and not any(name.startswith("_hvd_ckpt") for name in vars(block))
    apply_policy(block, KEEP)
    assert type(block) is Block


def through_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), through_file],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_have_the_policy_too(copied):
    chain, x = nn.Sequential(nn.Linear(8, 8), Block(), Block()), torch.randn(4, 8)
    expected = train(chain, x)
    policy = dropping(chain[1], x)
    apply_policy(chain[1], policy)
    apply_to_chain(chain, [(("0",), dropping(chain[0], x)), [(("1",), KEEP), (("2",), policy)]])
    other = copied(chain)
    assert type(other) is type(chain) and type(other[1]) is type(chain[1])
    assert not hasattr(other[1], "log")  # its own way of being copied is respected
    assert_same(expected, train(other, x))
    assert next(other.parameters()) is not next(chain.parameters())
    remove_policy(other)
    assert type(other) is nn.Sequential and type(chain) is not nn.Sequential
    assert_same(expected, train(chain, x))


def test_compiled_module_is_recomputed_as_a_whole():
    block, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    expected = train(block, x)
    block.compile(backend="eager")
    apply_policy(block, RECOMPUTE)
    assert_same(expected, train(block, x))
