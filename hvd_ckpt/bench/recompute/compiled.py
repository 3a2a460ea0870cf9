"""The same models under ``torch.compile``, whose partitioner decides itself what to keep, within a budget of activations.

A table of its own, because a compiled step and an eager one differ by more than what they recompute: fused kernels
keep less to begin with. What a plan of this library gives when the planned model is compiled stands beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hvd_ckpt.bench.recompute.chain import Builder, Forward
from hvd_ckpt.bench.recompute.contenders import KEEP, Contender

__all__ = ["COMPILED", "compile_chain", "compiled_contenders"]

COMPILED = "compiled"
BUDGETS = (0.7, 0.5, 0.3)  # as a part of what the partitioner would keep

_numbers = itertools.count()


def compiled_contenders() -> list[Contender]:
    """The whole chain as one graph: with the default partitioning, and with budgets."""
    return [
        Contender("compiled, no budget", KEEP, _build(1.0)),
        *(Contender(f"compiled, budget {budget:g}", COMPILED, _build(budget)) for budget in BUDGETS),
    ]


def _build(budget: float) -> Builder:
    return lambda model, inputs, needed: compile_chain(model, budget, whole=True)


def compile_chain(model: nn.Sequential, budget: float = 1.0, *, whole: bool = False) -> Forward:
    """``model`` under ``torch.compile`` with that ``activation_memory_budget``.

    Args:
        whole: whether it must be one graph; if not, what cannot be traced runs as it is.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    # Private, but the documented way: there is no public setting. It counts when the graph is cut, in the first call.
    patch: Callable[..., Any] = functorch.patch
    trace: Callable[..., Any] = dynamo.patch
    compiled = torch.compile(_function_of_its_own(model), fullgraph=whole, dynamic=False)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with patch(activation_memory_budget=budget), trace(allow_rnn=True):
            output: torch.Tensor = compiled(inputs)
        return output

    return forward


def _function_of_its_own(model: nn.Sequential) -> Forward:
    """A function whose code no other shares: the compiler finds its results by code, and all models here run the same."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(inputs)
        return output

    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return FunctionType(code, forward.__globals__, None, forward.__defaults__, forward.__closure__)
