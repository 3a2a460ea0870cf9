"""Gradients that are sums over the ranks already.

The average of equal gradients does not change them. With ``op=Sum``, gradients that were not cleared and are reduced again
would be multiplied by the number of ranks: that is an error.
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "_summed_by_hvd_ckpt"


def mark_summed(gradient: torch.Tensor) -> None:
    """Remembers that a gradient is a sum over the ranks, as long as it is not changed."""
    setattr(gradient, _ATTRIBUTE, gradient._version)


def keep_mark(gradient: torch.Tensor) -> None:
    """All ranks have changed a gradient in place in the same way."""
    if _ATTRIBUTE in vars(gradient):
        mark_summed(gradient)


def is_summed(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is a sum over the ranks; one that was changed in place since, or set to zero, is this rank's own."""
    if gradient is None or _ATTRIBUTE not in vars(gradient):
        return False
    if vars(gradient)[_ATTRIBUTE] == gradient._version:
        return True
    delattr(gradient, _ATTRIBUTE)
    return False


def summed_again(name: str) -> RuntimeError:
    """The error for a gradient that would be reduced again."""
    return RuntimeError(
        f"the gradient of parameter '{name}' is a sum over the ranks already, which op=Sum would multiply by their number; call "
        f"optimizer.zero_grad() after each step"
    )
