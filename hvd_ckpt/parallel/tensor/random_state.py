"""Random numbers of a split layer: each part draws those of the whole layer and uses its slice.

In a :class:`.region.Region` a part draws the dropout mask of all heads, features or positions and takes its slice. So masks differ
between the parts, the generator advances as with one part, and dropout outside draws the same numbers on all parts. No second
generator is needed, and recomputation and snapshots have one random state, as without parts. The cost is that each part draws all
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvd_ckpt.parallel.tensor.functions import POSITIONS, SHARE
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.rules import check

_HEADS = 1  # the dimension of heads in scores of attention, (batch, heads, queries, keys)


def _dropout(
    kind: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    mask = _mask(kind, input, p)
    result = input * (mask / (1 - p) if p < 1 else mask)  # of zeros
    return input.copy_(result) if inplace else result


def _refused(
    kind: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    check({"tensor": True, "dropout of channels or alpha dropout": training and p > 0.0})
    return input


def _mask(kind: int, x: Tensor, p: float) -> Tensor:
    """This part's slice of a mask of the whole: zeros with probability ``p``, and ones.

    It is drawn in the order of memory of ``x``, as dropout on a CPU draws it.
    """
    grid = current()
    last = x.dim() - 1
    dim = POSITIONS if kind == SHARE else _HEADS if x.dim() == 4 else last
    extent, strides = x.shape[dim], x.stride()
    # The dimensions from the outermost in memory to the innermost. Those of a tensor that was (batch, positions,
    # heads, width) and is transposed to (batch, heads, positions, width) are 0, 2, 1, 3.
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    whole = x.new_empty([x.shape[d] * (grid.tensor if d == dim else 1) for d in order])
    whole.bernoulli_(1 - p)
    slice_ = whole.narrow(order.index(dim), grid.part * extent, extent)
    return slice_.permute([order.index(d) for d in range(x.dim())])


def _attention(
    kind: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention whose dropout mask is a slice; without dropout PyTorch's own, whose kernels draw inside."""
    if dropout_p == 0.0 or kind == SHARE:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    check({"tensor": True, "dropout of attention with enable_gqa": options.get("enable_gqa")})
    scale = options.get("scale")
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype is torch.bool:
        # The least number instead of -inf: a query that sees nothing gets zeros, as from PyTorch, and no nan.
        hidden = ~attn_mask
        weights = (
            scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        )
    else:
        weights = (scores + attn_mask).softmax(-1)
    weights = weights.to(value.dtype)
    attended: Tensor = _dropout(kind, weights, dropout_p) @ value
    return attended


DRAWS: dict[Any, Callable[..., Tensor]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.dropout1d: _refused,
    functional.dropout2d: _refused,
    functional.dropout3d: _refused,
    functional.alpha_dropout: _refused,
    functional.feature_alpha_dropout: _refused,
    functional.scaled_dot_product_attention: _attention,
}
"""What replaces a function of tensors that are not whole; its first argument is their kind."""
