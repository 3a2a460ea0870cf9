"""Policies that drop results of calls, and ways to run a block."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from call_names import names_of_calls
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.recompute.tape import Policy, run_selectively
from hvd_ckpt.utils.memory import measure_peak


def drop_all(function: Callable[..., Any], *args: Any, keep: tuple[str, ...] = (), **options: Any) -> Policy:
    """A policy that drops the results of all calls but those of some names."""
    calls = names_of_calls(function, *args)
    return Policy(calls, frozenset(i for i, call in enumerate(calls) if call not in keep), **options)


def some(calls: tuple[str, ...], seed: int) -> Policy:
    """A policy that drops the results of some calls."""
    choose = random.Random(seed)
    share = (1.0, 0.8, 0.5, 0.2)[seed % 4]
    dropped = frozenset(i for i in range(len(calls)) if choose.random() < share)
    breaks = frozenset(i for i in dropped if seed % 3 and choose.random() < 0.3)
    return Policy(calls, dropped, breaks, compress=seed % 2 == 1)


def selectively(policy: Policy) -> Callable[..., Any]:
    return lambda function, *args: run_selectively(function, args, {}, policy)


def held(run: Callable[[Tensor], Any], x: Tensor) -> int:
    """Bytes that a forward pass leaves behind."""
    outputs: list[Any] = []
    return measure_peak(lambda: outputs.append(run(x))).held_bytes


def on_cpu(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return hc.checkpoint(block, x)
