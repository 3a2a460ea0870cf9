"""Ways of recomputation: each runs a module, or a function of modules, on inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import hvd_ckpt as hc

Run = Callable[..., Any]

reentrant = functools.partial(hc.checkpoint, use_reentrant=True)


def plainly(function: Run, *args: Any, **kwargs: Any) -> Any:
    """Runs a function without recomputation."""
    return function(*args, **kwargs)


def by_function(function: Any, *inputs: Any) -> Any:
    """CheckpointFunction, which gets the parameters of a module as arguments."""
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    return hc.CheckpointFunction.apply(function, len(inputs), *inputs, *parameters)


WAYS: dict[str, Run] = {
    "non-reentrant": hc.checkpoint,
    "reentrant": reentrant,
    "CheckpointFunction": by_function,
    "lambda": lambda block, *inputs: hc.checkpoint(lambda *given: block(*given), *inputs),
    "segments": lambda block, *inputs: hc.checkpoint_sequential([block], 1, *inputs, keep_last=False),
    "reentrant segments": lambda block, *inputs: hc.checkpoint_sequential(
        [block], 1, *inputs, use_reentrant=True, keep_last=False
    ),
    "nested": lambda block, *inputs: hc.checkpoint(lambda *given: hc.checkpoint(block, *given), *inputs),
}


def each(run: Run) -> Run:
    """A way for each block of a chain."""
    return lambda model, x: functools.reduce(lambda hidden, block: run(block, hidden), model, x)


def in_segments(use_reentrant: bool) -> Run:
    """A chain in two segments."""
    return lambda model, x: hc.CheckpointSequential(model, 2, use_reentrant, keep_last=False)(x)


def in_lambdas(model: Any, x: Any) -> Any:
    """A region for each block, each of which reaches the whole chain."""
    for number in range(len(model)):
        x = hc.checkpoint(lambda y, number=number: model[number](y), x)
    return x


def saving(*operators: Any) -> Run:
    """Regions in which PyTorch's selective checkpointing saves the results of some operators."""
    contexts = functools.partial(create_selective_checkpoint_contexts, list(operators))
    return functools.partial(hc.checkpoint, context_fn=contexts)


CHAINS: dict[str, Run] = {
    **{name: each(WAYS[name]) for name in ("non-reentrant", "reentrant", "nested")},
    "segments": in_segments(False),
    "reentrant segments": in_segments(True),
    "lambdas": in_lambdas,
    "selective": each(saving(torch.ops.aten.addmm.default)),
}
"""Of chains of blocks."""


def each_of(*names: str) -> Any:
    """Parametrizes a test by ways that are its argument ``run``."""
    return pytest.mark.parametrize("run", [WAYS[name] for name in names], ids=names)


VARIANTS = each_of("non-reentrant", "reentrant")
EVERY_KIND = each_of("non-reentrant", "reentrant", "CheckpointFunction")
