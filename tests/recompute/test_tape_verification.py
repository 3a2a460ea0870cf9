"""Tests of the verification of dropped results: replayed tensors equal them, or an error names the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from call_names import names_of_calls
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.recompute.tape import Policy, run_selectively
from hvd_ckpt.recompute.verify import verifying

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS = iter(range(1, 1 << 30))
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _first() -> Iterator[None]:
    with verifying("first"):
        yield


def operator(name: str, function: Callable[[Tensor], Tensor]) -> Any:
    """A custom operator that saves its result for its backward pass."""
    made = torch.library.custom_op(
        f"hvd_ckpt_verified::{name}", function, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    made.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return made


counted = operator("counted", lambda x: x * next(CALLS))
hidden_generator = operator("hidden_generator", lambda x: x * torch.rand(x.shape, generator=GENERATOR))
unfilled = operator(
    "unfilled", lambda x: torch.where(x > 0, x, torch.empty_like(x).fill_(float(next(CALLS))))
)
rounding = operator("rounding", lambda x: x * (1 + 1e-6 * (next(CALLS) % 7)))
FACTOR = [1.0]
scaled = operator("scaled", lambda x: x * FACTOR[0])


class Layer(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.middle = nn.Linear(8, 8), middle

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.middle(self.linear(x)))


def planned(middle: Callable[[Tensor], Tensor], **options: Any) -> tuple[Layer, Policy]:
    layer = Layer(lambda x: middle(x))
    calls = names_of_calls(layer, torch.randn(4, 8))
    return layer, Policy(calls, frozenset(i for i, call in enumerate(calls) if call != "linear"), **options)


@pytest.mark.parametrize("middle", [counted, hidden_generator, unfilled])
def test_other_values_are_an_error_that_names_the_block_and_the_call(middle: Any) -> None:
    layer, policy = planned(middle)
    out = run_selectively(layer, (torch.randn(4, 8),), {}, policy)
    with pytest.raises(hc.RecomputationMismatch, match=rf"Layer.*{middle._name}.*without_recomputation"):
        out.sum().backward()


def test_a_second_pass_is_not_verified_unless_asked() -> None:
    layer, policy = planned(scaled)

    def step(after_forward: float) -> None:
        FACTOR[0] = 1.0
        out = run_selectively(layer, (torch.randn(4, 8),), {}, policy)
        FACTOR[0] = after_forward
        out.sum().backward()

    step(1.0)
    step(2.0)
    layer.eval()
    with pytest.raises(hc.RecomputationMismatch):
        step(2.0)  # another mode is another pass
    layer.train()
    with verifying("always"), pytest.raises(hc.RecomputationMismatch):
        step(2.0)
    with verifying("never"):
        step(2.0)
    fresh, policy = planned(scaled)
    layer = fresh
    with pytest.raises(hc.RecomputationMismatch):
        step(2.0)


def test_another_policy_at_the_place_of_an_old_one_is_verified() -> None:
    layer, _ = planned(scaled)
    FACTOR[0] = 1.0
    for number in range(20):  # a freed policy gives its place in memory to the next one
        _, policy = planned(scaled, breaks=frozenset({number}))
        out = run_selectively(layer, (torch.randn(4, 8),), {}, policy)
        FACTOR[0] += 1.0
        with pytest.raises(hc.RecomputationMismatch):
            out.sum().backward()
        run_selectively(layer, (torch.randn(4, 8),), {}, policy).sum().backward()


def test_a_difference_of_the_size_of_rounding_warns() -> None:
    layer, policy = planned(rounding)
    with pytest.warns(UserWarning, match="rounds in another way.*deterministic"):
        run_selectively(layer, (torch.randn(4, 8),), {}, policy).sum().backward()
