"""Tests of the search for the chain of a model, and of the candidate policies of a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.planning.candidates import candidates, estimate
from hvd_ckpt.planning.trace import trace


def names_of(model, *args, blocks=None, **kwargs):
    found = find_blocks(model, lambda: model(*args, **kwargs), blocks)
    return [block.members for block in found]


class Block(nn.Module):
    def __init__(self, width=8, inner=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Walked(nn.Module):
    """A list that the forward pass walks in an order of its own."""

    def __init__(self, order, count=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def test_leaves_in_a_row_make_blocks_with_two_weights():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten()
    )
    members = names_of(model, torch.randn(2, 3, 8, 8))
    assert [name for block in members for name in block] == list("012345")
    assert members[0] == ("0", "1")
    assert len(members) == 2


def test_stages_are_opened():
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.Sequential(Block(), Block()),
        nn.Sequential(Block(), nn.Sequential(Block(), Block())),
    )
    assert names_of(model, torch.randn(2, 4)) == [
        ("0",),
        ("1.0",),
        ("1.1",),
        ("2.0",),
        ("2.1.0",),
        ("2.1.1",),
    ]


def test_lists_are_taken_in_the_order_of_the_forward_pass():
    assert names_of(Walked([2, 0, 1]), torch.randn(2, 8)) == [("layers.2",), ("layers.0",), ("layers.1",)]


def test_blocks_called_twice_or_never_are_left_alone():
    assert names_of(Walked([0, 1, 1]), torch.randn(2, 8)) == [("layers.0",)]


def test_inputs_of_a_block_like_one_that_is_called_twice():
    """Layers 1 and 2 are like layer 0, which is no block because it is called twice: they are still blocks."""
    model = Walked([0, 0, 1, 2])
    found = find_blocks(model, lambda: model(torch.randn(2, 8, requires_grad=True)))
    assert [(block.members, block.like) for block in found] == [(("layers.1",), 0), (("layers.2",), 0)]
    assert found[0].args[0].shape == (2, 8)


def test_blocks_that_are_alike_are_known_as_such():
    model = Walked([0, 1, 2, 3], 4)
    model.layers[2] = Block()
    model.layers[2].norm.eps = 1e-3
    for parameter in model.layers[3].parameters():
        parameter.requires_grad_(False)
    found = find_blocks(model, lambda: model(torch.randn(2, 8, requires_grad=True)))
    assert [block.like for block in found] == [0, 0, 2, 3]
    assert found[0].args is not None and found[1].args is None


def test_named_blocks():
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    both = nn.Sequential(Block(), nn.Sequential(model["a"], model["b"]))
    x = torch.randn(2, 8)
    assert names_of(both, x, blocks=["1"]) == [("1",)]
    assert names_of(both, x, blocks=["0", "1.*"]) == [("0",), ("1.0",), ("1.1",)]
    assert names_of(both, x, blocks=["*"]) == [("0",), ("1",)]
    with pytest.raises(ValueError, match="'2' is not a module of this Sequential"):
        names_of(both, x, blocks=["2"])
    with pytest.raises(ValueError, match=r"'2\.\*' is not a module"):
        names_of(both, x, blocks=["2.*"])
    with pytest.raises(ValueError, match=r"'1\.0' lies in '1'"):
        names_of(both, x, blocks=["1", "1.0"])
    assert names_of(both, x, blocks=["0", "0", "1"]) == [("0",), ("1",)]


@pytest.mark.parametrize("model", [nn.Linear(8, 8), Walked([0, 0], 2), Block()])
def test_no_chain(model):
    with pytest.raises(ValueError, match="No chain of blocks was found in this .*blocks="):
        names_of(model, torch.randn(2, 8))


def test_finding_leaves_no_hooks():
    model = Walked([0, 1])
    with pytest.raises(IndexError):
        find_blocks(Walked([7]), lambda: Walked([7])(torch.randn(2, 8)))
    names_of(model, torch.randn(2, 8))
    assert not any(module._forward_pre_hooks for module in model.modules())


def candidates_of(block, *args):
    traced = trace(block, args, {})
    for call in traced.calls:  # as on most machines, whatever was measured here
        call.seconds = 1e-3 if call.name == "linear" else 1e-4
    return traced, {
        frozenset(traced.calls[number].name for number in policy.selective.dropped): policy
        for policy in candidates(traced)[1:]
    }


def test_candidates_keep_matrix_products_and_drop_what_is_cheap():
    traced, found = candidates_of(Block(256, 512), torch.randn(512, 256, requires_grad=True))
    assert candidates(traced)[0].title == "keep"
    assert any("gelu" in dropped and "linear" not in dropped for dropped in found)
    everything = max(found, key=len)
    assert {"layer_norm", "gelu", "linear"} <= everything


def test_estimates_of_a_policy_count_what_it_frees():
    rows, width = 256, 64
    traced, _ = candidates_of(Block(width), torch.randn(rows, width, requires_grad=True))
    number = {call.name: index for index, call in enumerate(traced.calls)}
    keep = estimate(traced, frozenset())
    without = estimate(traced, frozenset({number["gelu"]}))
    assert keep.kept - without.kept == rows * 32 * 4
    assert (keep.seconds, keep.working) == (0.0, 0)
    assert without.seconds == traced.calls[number["gelu"]].seconds


def test_candidates_in_halves():
    """Dropping everything, replayed in two parts, needs less at a time."""
    chain = nn.Sequential(*[Block(16) for _ in range(4)])
    traced = trace(chain, (torch.randn(64, 16, requires_grad=True),), {})
    halves = [policy for policy in candidates(traced) if policy.selective and policy.selective.breaks]
    assert halves
    for policy in halves:
        selective = policy.selective
        assert selective.breaks <= selective.dropped
        whole = estimate(traced, selective.dropped)
        assert estimate(traced, selective.dropped, selective.breaks).working < 0.9 * whole.working
        assert "in two parts" in policy.title
