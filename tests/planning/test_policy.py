"""Tests of modules with a checkpoint policy: class, parameters, copies, files and results stay the same."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same import assert_same
from selective import drop_all
from torch import Tensor, nn

from hvd_ckpt.planning.policy import (
    KEEP,
    CheckpointPolicy,
    apply_policy,
    apply_to_chain,
    base_class,
    remove_policy,
)


class Block(nn.Module):
    """A block with arguments by name, random numbers, and something that cannot be pickled."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.log = open("/dev/null")  # noqa: SIM115

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + scale * nn.functional.dropout(self.down(hidden), 0.2, self.training)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "log"}


def dropping(function: Callable[[Tensor], Any], x: Tensor) -> CheckpointPolicy:
    return CheckpointPolicy("drop all", drop_all(function, x))


def train(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recompute", [False, True], ids=["policy", "recompute"])
def test_module_with_a_policy_is_still_itself(recompute: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 8)
    expected, shown, keys = train(block, x), repr(block), list(block.state_dict())
    apply_policy(block, CheckpointPolicy("recompute", recompute=True) if recompute else dropping(block, x))
    assert isinstance(block, Block) and type(block) is not Block and base_class(block) is Block
    assert (type(block).__name__, repr(block), list(block.state_dict())) == ("Block", shown, keys)
    assert_same(expected, train(block, x))
    assert torch.equal(block.eval()(x, scale=2.0), Block.forward(block, x, scale=2.0))
    remove_policy(block)
    assert type(block) is Block and not any(name.startswith("_hvd_ckpt") for name in vars(block))
    remove_policy(block)
    apply_policy(block, KEEP)
    assert type(block) is Block


def through_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), through_file],
    ids=["deepcopy", "pickle", "torch.save"],
)  # fmt: skip
def test_copies_have_the_policy_too(copied: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
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


def test_compiled_module_is_recomputed_as_a_whole() -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    expected = train(block, x)
    block.compile(backend="eager")
    apply_policy(block, CheckpointPolicy("recompute", recompute=True))
    assert_same(expected, train(block, x))
