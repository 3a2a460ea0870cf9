"""The reentrant variant of checkpoint: one autograd node that runs a backward pass of its own within the backward pass.

PyTorch's own takes positional tensors only, drops the gradients of the parameters if no input requires one, and gives zeros instead
of no gradient to the parameters behind an unused output. The node here has none of these limits: arguments and results may be
nested structures with tensors anywhere in them, and gradients are those without recomputation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from hvd_ckpt.recompute.containers import flatten
from hvd_ckpt.recompute.region import Region
from hvd_ckpt.utils.torch_private import execution_engine


def run_reentrant(region: Region) -> Any:
    """The result of the region, which the reentrant variant recomputes. A parameter or an argument must require a gradient."""
    tensors = list(region.tensors)
    if not any_requires_grad(tensors):
        # Without an input that requires a gradient, autograd would not record the call.
        tensors.append(torch.zeros((), requires_grad=True, dtype=torch.float32))
    made: list[Any] = []
    leaves = _Reentrant.apply(region, made, *tensors)  # type: ignore[no-untyped-call]
    region.release_first_pass()
    return made[0](leaves)


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Whether a tensor among some values requires a gradient."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


class _Reentrant(torch.autograd.Function):
    """From the tensors among the arguments of a region to the values in its result."""

    @staticmethod
    def forward(ctx: Any, region: Region, made: list[Any], *tensors: torch.Tensor) -> Any:
        # So that a result without a gradient is told from one whose gradient is zero: nothing behind it gets one.
        ctx.set_materialize_grads(False)
        ctx.region, ctx.count = region, len(region.tensors)
        ctx.save_for_backward(*tensors)
        leaves, make = flatten(region(*tensors))  # autograd calls this without gradients
        made.append(make)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if any(gradient is not None for gradient in gradients):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "A function that is checkpointed with use_reentrant=True gives no gradients of gradients (create_graph=True): "
                    "use use_reentrant=False, which does."
                )
            if not execution_engine.is_checkpoint_valid():
                raise RuntimeError(
                    "A function that is checkpointed with use_reentrant=True does not work with torch.autograd.grad() or "
                    "backward(inputs=...): use use_reentrant=False, which does."
                )
            with torch.enable_grad():
                _backward(ctx, gradients, found)
        return None, None, *found


def _backward(ctx: Any, gradients: tuple[torch.Tensor | None, ...], found: list[torch.Tensor | None]) -> None:
    """Recomputes the region, runs the backward pass through it, and notes the gradients of its tensors in ``found``."""
    given = [
        _Input.apply(tensor.detach().requires_grad_(), found, place)  # type: ignore[no-untyped-call]
        if needed
        else tensor.detach()
        for place, (tensor, needed) in enumerate(zip(ctx.saved_tensors, ctx.needs_input_grad[2:]))
    ]
    args, kwargs = ctx.region.arguments.rebuild(given)
    results = flatten(ctx.region.recompute(args, kwargs))[0]
    _check_returned(flatten((args, kwargs))[0], results)
    if not any_requires_grad(results):
        # An argument that requires a gradient would lose it without a word. Parameters within reach may be frozen or unused.
        if any(ctx.needs_input_grad[2 : 2 + ctx.count]):
            raise RuntimeError(
                "None of the results of a function that is checkpointed with use_reentrant=True has requires_grad=True when it is "
                "recomputed, though an argument has: call it without checkpoint, or with use_reentrant=False."
            )
        warnings.warn(
            "None of the results of a checkpointed function requires gradients, so it was recomputed for nothing: "
            "call it without checkpoint, or with use_reentrant=False.",
            stacklevel=2,
        )
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients)
        if gradient is not None and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    if pairs:
        outputs, incoming = zip(*pairs)
        torch.autograd.backward(outputs, incoming)


def _check_returned(held: Iterable[Any], results: Iterable[Any]) -> None:
    """Raises RuntimeError if the function has stored a tensor in its arguments whose gradient would be lost."""
    returned = {id(result) for result in results}
    for value in held:
        if not isinstance(value, torch.Tensor) or not value.requires_grad or id(value) in returned:
            continue
        if value.grad_fn is not None and not isinstance(value.grad_fn, _Input._backward_cls):
            raise RuntimeError(
                f"A function that is checkpointed with use_reentrant=True stores a tensor of shape {tuple(value.shape)} in its "
                "arguments without returning it, so its gradient would be lost: return it, or use use_reentrant=False."
            )


class _Input(torch.autograd.Function):
    """Identity of an input of the recomputation, which takes the input's gradient.

    Accumulated in a leaf, the gradient would get the strides of the leaf, and sums before the region would run in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gradients: list[torch.Tensor | None], place: int
    ) -> torch.Tensor:
        ctx.gradients, ctx.place = gradients, place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.place] = gradient
        return None, None, None
