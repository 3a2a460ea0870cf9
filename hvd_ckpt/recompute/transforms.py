"""Check for transforms that do not work with recomputation: forward-mode derivatives and the transforms of :mod:`torch.func`.

Their tensors belong to the level of the transform, which has ended when the backward pass recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hvd_ckpt.recompute.region import reach
from hvd_ckpt.utils.torch_private import dual_level, in_functorch


def is_transformed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call runs inside a transform of :mod:`torch.func`, or on tensors that carry a forward-mode derivative."""
    if in_functorch():
        return True
    if dual_level() < 0:
        return False
    reached = reach(function, args, kwargs)
    parameters = (parameter for module in reached.modules for parameter in module._parameters.values())
    return any(_has_tangent(tensor) for tensor in (*reached.tensors, *parameters) if tensor is not None)


def refuse_transforms(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError if :func:`is_transformed`; called in a forward pass that would be recomputed."""
    if is_transformed(function, args, kwargs):
        raise RuntimeError(
            "Forward-mode derivatives and the transforms of torch.func (jvp, vmap, grad, ...) cannot pass through a block that is "
            "recomputed, by a plan or a checkpoint: run this forward pass inside `with hc.without_recomputation():`."
        )


def _has_tangent(tensor: Tensor) -> bool:
    with torch.no_grad():
        return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
