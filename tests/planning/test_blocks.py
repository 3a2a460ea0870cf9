"""Tests of the search for the chain of a model, and of the candidate policies of a block."""

from __future__ import annotations

import contextlib

import pytest
import torch
from residual import Listed, Residual
from torch import nn

from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.planning.candidates import candidates, estimate
from hvd_ckpt.planning.trace import trace


def names_of(model, x, blocks=None):
    return [block.members for block in find_blocks(model, lambda: model(x), blocks)]


def walked(*order, count=3):
    """Blocks that run in this order."""
    return Listed(*(Residual(8) for _ in range(count)), order=order)


def residuals(count):
    return nn.Sequential(*(Residual(8) for _ in range(count)))


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (
            nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten()
            ),
            torch.randn(2, 3, 8, 8),
            [("0", "1"), ("2", "3", "4", "5")],
        ),
        (
            nn.Sequential(nn.Linear(4, 8), residuals(2), nn.Sequential(Residual(8), residuals(2))),
            torch.randn(2, 4),
            [("0",), ("1.0",), ("1.1",), ("2.0",), ("2.1.0",), ("2.1.1",)],
        ),
        (walked(2, 0, 1), torch.randn(2, 8), [("layers.2",), ("layers.0",), ("layers.1",)]),
        (walked(0, 1, 1), torch.randn(2, 8), [("layers.0",)]),
    ],
    ids=["leaves with two weights", "stages are opened", "in the order of calls", "called twice or never"],
)  # fmt: skip
def test_blocks_that_are_found(model, x, expected):
    assert names_of(model, x) == expected


def test_blocks_that_are_alike_are_known_as_such():
    model, x = walked(0, 1, 2, 3, count=4), torch.randn(2, 8, requires_grad=True)
    model.layers[2].norm.eps = 1e-3
    model.layers[3].requires_grad_(False)
    found = find_blocks(model, lambda: model(x))
    assert [block.like for block in found] == [0, 0, 2, 3]
    assert found[0].args is not None and found[1].args is None
    # Layers 1 and 2 are like layer 0, which is no block because it is called twice: they are still blocks.
    model = walked(0, 0, 1, 2)
    found = find_blocks(model, lambda: model(x))
    assert [(block.members, block.like) for block in found] == [(("layers.1",), 0), (("layers.2",), 0)]
    assert found[0].args[0].shape == (2, 8)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (["1"], [("1",)]),
        (["0", "1.*"], [("0",), ("1.0",), ("1.1",)]),
        (["*"], [("0",), ("1",)]),
        (["0", "0", "1"], [("0",), ("1",)]),
        (["2"], "'2' is not a module of this Sequential"),
        (["2.*"], r"'2\.\*' is not a module"),
        (["1", "1.0"], r"'1\.0' lies in '1'"),
    ],
)
def test_named_blocks(blocks, expected):
    model, x = nn.Sequential(Residual(8), residuals(2)), torch.randn(2, 8)
    if isinstance(expected, list):
        assert names_of(model, x, blocks) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            names_of(model, x, blocks)


@pytest.mark.parametrize("model", [nn.Linear(8, 8), walked(0, 0, count=2), Residual(8)])
def test_no_chain(model):
    with pytest.raises(ValueError, match="No chain of blocks was found in this .*blocks="):
        names_of(model, torch.randn(2, 8))


def test_finding_leaves_no_hooks():
    for model, errors in ((walked(0, 1), ()), (walked(7), IndexError)):
        with contextlib.suppress(errors):
            names_of(model, torch.randn(2, 8))
        assert not any(module._forward_pre_hooks for module in model.modules())


# ---- candidate policies ----


def traced_block(block, x):
    traced = trace(block, (x.requires_grad_(),), {})
    for call in traced.calls:  # as on most machines, whatever was measured here
        call.seconds = 1e-3 if call.name == "linear" else 1e-4
    return traced


def test_candidates_keep_matrix_products_and_drop_what_is_cheap():
    traced = traced_block(Residual(256), torch.randn(512, 256))
    keep, *others = candidates(traced)
    found = [{traced.calls[number].name for number in policy.selective.dropped} for policy in others]
    assert keep.title == "keep"
    assert any("gelu" in dropped and "linear" not in dropped for dropped in found)
    assert {"layer_norm", "gelu", "linear"} <= max(found, key=len)


def test_estimates_of_a_policy_count_what_it_frees():
    traced = traced_block(Residual(64), torch.randn(256, 64))
    gelu = next(number for number, call in enumerate(traced.calls) if call.name == "gelu")
    keep, without = (estimate(traced, frozenset(dropped)) for dropped in ((), (gelu,)))
    assert keep.kept - without.kept == 256 * 4 * 64 * 4
    assert (keep.seconds, keep.working) == (0.0, 0)
    assert without.seconds == traced.calls[gelu].seconds


def test_candidates_in_halves():
    """Dropping everything, replayed in two parts, needs less at a time."""
    chain = nn.Sequential(*[Residual() for _ in range(4)])
    traced = trace(chain, (torch.randn(64, 16, requires_grad=True),), {})
    halves = [policy for policy in candidates(traced) if policy.selective and policy.selective.breaks]
    assert halves
    for policy in halves:
        selective = policy.selective
        assert selective.breaks <= selective.dropped
        whole = estimate(traced, selective.dropped)
        assert estimate(traced, selective.dropped, selective.breaks).working < 0.9 * whole.working
        assert "in two parts" in policy.title
