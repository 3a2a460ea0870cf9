"""Selective recomputation of calls that change tensors in place, or depend on more than their arguments."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from call_names import names_of_calls
from selective import checkpointed, drop_all, on_cpu, selectively
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.recompute.tape import Policy, run_selectively

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


TRANSFORMS = {
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (torch.ones_like(x),)),
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "vjp": lambda run, x: torch.func.vjp(run, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("planned", [True, False])
def test_transforms_are_refused_in_the_forward_pass(transform: Callable[..., object], planned: bool) -> None:
    linear = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        return F.gelu(linear(x)).sin()

    x = torch.randn(4, 4)
    policy = drop_all(block, x)
    run = (
        functools.partial(selectively(policy), block) if planned else functools.partial(hc.checkpoint, block)
    )
    with pytest.raises(RuntimeError, match=r"recomputed.*hc\.without_recomputation"):
        transform(run, x)
    with hc.without_recomputation():
        transform(run, x)


def test_dual_tensors_are_refused_and_others_are_not() -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def block(y: Tensor) -> Tensor:
        return F.gelu(y @ weight).sin()

    policy = drop_all(block, x)
    with torch.autograd.forward_ad.dual_level():
        run_selectively(block, (x,), {}, policy).sum().backward()
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"hc\.without_recomputation"):
            run_selectively(block, (dual,), {}, policy)


def test_two_forward_passes_of_a_block_that_writes_buffers_before_a_backward_pass() -> None:
    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
        calls = names_of_calls(copy.deepcopy(block), torch.randn(4, 8))
        policy = Policy(calls, frozenset(range(len(calls))))
        losses = []
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            losses.append(
                (run_selectively(block, (x,), {}, policy) if recompute else block(x)).square().sum()
            )
        (losses[0] - losses[1]).backward()
        return [parameter.grad for parameter in block.parameters()]

    for ours, theirs in zip(gradients(True), gradients(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
