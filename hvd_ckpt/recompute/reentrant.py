"""PyTorch's reentrant checkpoint, for any arguments and results.

PyTorch's own takes positional tensors only, drops the gradients of the parameters when no input requires one,
and hands zeros instead of nothing to the parameters behind an output that nobody used. Here arguments and
results may be nested structures with tensors anywhere in them, and gradients come out as they would without
recomputation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction as _TorchFunction

from hvd_ckpt.recompute.region import Region
from hvd_ckpt.torch_private import pytree


def checkpoint_reentrant(
    region: Region, preserve_rng_state: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``region(*args, **kwargs)``, recomputed by the reentrant variant. At least one parameter must require a
    gradient, or one tensor in the arguments."""
    run = _FlatRun(region, args, kwargs)
    tensors = list(run.tensors)
    if not any(tensor.requires_grad for tensor in tensors):
        # Without an input that requires grad autograd would not record the call at all.
        run.anchored = True
        tensors.append(torch.zeros((), requires_grad=True))
    leaves = _ReentrantCheckpoint.apply(run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]
    run.release_first_pass()
    return pytree.tree_unflatten(list(leaves), run.result_structure)


class _FlatRun:
    """The region as a function from a flat list of tensors to a flat tuple of results."""

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._constants = [None if is_tensor else leaf for leaf, is_tensor in zip(leaves, self._is_tensor)]
        self._region = region
        # The first pass gets the caller's own containers, so that what the function does to them is seen by
        # the caller.
        self._first_pass: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.result_structure: Any = None
        self.wanted: list[bool] | None = None
        self.anchored = False  # only a tensor of ours makes autograd record the call

    def release_first_pass(self) -> None:
        """Lets go of the arguments: autograd holds the tensors from here on."""
        self._first_pass = None
        self.tensors = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        if self._first_pass is not None:
            args, kwargs = self._first_pass
            leaves, self.result_structure = pytree.tree_flatten(self._region(*args, **kwargs))
            return tuple(leaves)
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else constant
            for is_tensor, constant in zip(self._is_tensor, self._constants)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        results, _ = pytree.tree_flatten(self._region(*args, **kwargs))
        return self._only_wanted(results, tensors)

    def _only_wanted(self, results: list[Any], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The recomputed results, cut from the graph where no gradient arrived, so that what lies behind them
        gets none.

        PyTorch refuses to go backward when no result requires grad. That is right where an argument does, and nothing
        else would say that its gradient is lost. It is wrong where a gradient arrived only for results that need none
        beside one that does, or where the parameters within reach turn out to be frozen or unused; then one result is
        tied to an input that requires grad, which gets no gradient from it.
        """
        assert self.wanted is not None
        if not _any_requires_grad(results):
            if not self.anchored:
                return tuple(results)
            warnings.warn(
                "None of the results of a checkpointed function requires gradients, so it was recomputed for nothing: "
                "call it without checkpoint, or with use_reentrant=False.",
                stacklevel=2,
            )
        kept = [
            result.detach() if isinstance(result, torch.Tensor) and not wanted else result
            for result, wanted in zip(results, self.wanted)
        ]
        if not _any_requires_grad(kept):
            index = self.wanted.index(True)
            anchor = next(tensor for tensor in tensors if tensor.requires_grad)
            kept[index] = _Tie.apply(kept[index], anchor)  # type: ignore[no-untyped-call]
        return tuple(kept)


def _any_requires_grad(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


class _ReentrantCheckpoint(_TorchFunction):
    """PyTorch's function; it tells the run which results a gradient arrived for."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], preserve_rng_state: bool, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return _TorchFunction.forward(ctx, run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.run_function.wanted = [gradient is not None for gradient in gradients]
        if not any(ctx.run_function.wanted):
            return (None,) * len(ctx.needs_input_grad)
        return _TorchFunction.backward(ctx, *gradients)  # type: ignore[no-untyped-call]


class _Tie(torch.autograd.Function):
    """Identity of ``result`` that makes it require grad; the gradient reaches nobody new."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
