"""Selective recomputation of calls that change tensors in place, or depend on more than their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from call_names import names_of_calls
from selective import checkpointed, drop_all, on_cpu, selectively, some
from torch import Tensor
from torch.nn import functional as F

from hvd_ckpt.recompute.tape import run_selectively

pytestmark = pytest.mark.usefixtures("one_thread")


def under_no_hooks(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


@pytest.mark.parametrize("around", [under_no_hooks, on_cpu])
@pytest.mark.parametrize("kept", [(), ("mul", "gelu")], ids=["argument", "saved"])
def test_kept_tensor_changed_in_place_is_an_error(
    around: Callable[..., Tensor], kept: tuple[str, ...]
) -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def function(y: Tensor) -> Tensor:
        return F.gelu(y * 2) @ weight

    policy = drop_all(function, x, keep=kept, compress=True)
    out = around(lambda y: run_selectively(function, (y,), {}, policy), x)
    changed = weight if around is under_no_hooks else out
    with torch.no_grad():
        changed.mul_(2)
    if around is under_no_hooks:
        with pytest.raises(RuntimeError, match="'matmul' needs.*modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()  # nobody needs the result


@pytest.mark.parametrize("around", [under_no_hooks, on_cpu, checkpointed])
def test_tensor_changed_after_it_was_saved_never_gives_a_wrong_gradient(
    around: Callable[..., Tensor],
) -> None:
    def spoil(x: Tensor) -> Tensor:
        y = x.sin()
        z = y * y
        y.add_(1)
        return z + y.cos()

    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sin() ** 2 + (x.sin() + 1).cos()).sum(), x)[0]
    errors = 0
    for keep in ((), ("sin",), ("mul",), ("add_",), ("sin", "mul"), ("sin", "cos")):
        policy = drop_all(spoil, x, keep=keep)
        out = around(functools.partial(selectively(policy), spoil), x)
        try:
            torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
        except RuntimeError as error:
            errors += "modified by an inplace operation" in str(error)
    assert errors


def sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), x.sin()) * x


def generator(x: Tensor) -> Tensor:
    noise = torch.Generator().manual_seed(3)
    mask = torch.bernoulli(x.detach().sigmoid(), generator=noise)
    return x.sin() * mask * torch.rand(4, 4, generator=noise)


def gradient_inside(x: Tensor) -> Tensor:
    y = x.sin() * x
    (slope,) = torch.autograd.grad(y.exp().sum(), y, create_graph=True)
    return slope * x


def behind_the_counters(x: Tensor) -> Tensor:
    y, z = x.sin(), x.cos()
    y.data.mul_(0.5)
    z.data = z.detach() * 3
    return y * z * x


def chosen_kernel(x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None], (x * 2)[None], x.sin()[None])


def renormalized(x: Tensor) -> Tensor:
    return F.embedding(torch.tensor([[0, 1], [2, 3]]).t(), x * 2, max_norm=1.0) * 2


def not_needing_grad_before(x: Tensor) -> Tensor:
    return torch.ones(4, 4).mul(2).div_(x.exp()).pow_(x.sigmoid()) * x


def out_argument(x: Tensor) -> Tensor:
    mask = torch.ones(4, 4).mul(2)
    y = x + mask
    torch.mul(mask, 3, out=mask)
    return y * mask * y.sin()


ODD = [
    sparse, generator, gradient_inside, behind_the_counters, chosen_kernel, renormalized, not_needing_grad_before, out_argument,
]  # fmt: skip


@pytest.mark.parametrize("function", ODD)
def test_odd_calls(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    calls = names_of_calls(function, x)
    expected = torch.autograd.grad(function(x).square().sum(), x)[0]
    for seed in range(8):
        out = run_selectively(function, (x,), {}, some(calls, seed))
        assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected)
