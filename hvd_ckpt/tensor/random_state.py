"""Random numbers of a split layer: each part draws those of the whole layer and uses its slice.

Within :class:`WholeDraws` a part draws the dropout mask of all heads, features or positions and takes its slice. So masks differ
between the parts, the generator advances as with one part, and dropout outside draws the same numbers on all parts. No second
generator is needed, and recomputation and snapshots have one random state, as without parts. The cost is that each part draws all
numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hvd_ckpt.processes.grid import current
from hvd_ckpt.tensor.functions import POSITIONS

_running = threading.local()  # autograd recomputes in threads of its own
_DROPOUT = {functional.dropout, torch.dropout}
_HEADS = 1  # the dimension of heads in scores of attention, (batch, heads, queries, keys)


class WholeDraws(TorchFunctionMode):
    """A context in which dropout masks are slices of those of the whole layer, until :func:`end_split`.

    Args:
        positions: each part has a share of the positions instead of one of the heads or features, up to the end.
    """

    def __init__(self, positions: bool = False) -> None:
        super().__init__()
        self.split, self.positions = True, positions
        self._before: WholeDraws | None = None

    def __enter__(self) -> WholeDraws:
        self._before = getattr(_running, "draws", None)
        _running.draws = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _running.draws = self._before
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.split and func in _DROPOUT:
            return self._dropout(*args, **kwargs)
        if self.split and not self.positions and func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return functional.dropout(input, p, training, inplace)
        result = input * _mask(input, p, POSITIONS if self.positions else None)
        return input.copy_(result) if inplace else result


def end_split() -> None:
    """From here on, what runs is no longer split: a row parallel layer has summed it."""
    draws = getattr(_running, "draws", None)
    if draws is not None and not draws.positions:
        draws.split = False


def _mask(x: Tensor, p: float, dim: int | None = None) -> Tensor:
    """This part's slice along ``dim``, by default that of heads or features, of a mask of the whole.

    It is drawn in the order of memory of ``x``, as dropout on a CPU draws it.
    """
    grid = current()
    if dim is None:
        dim = _HEADS if x.dim() == 4 else x.dim() - 1
    own = x.shape[dim]
    strides = x.stride()
    # The dimensions from the outermost in memory to the innermost. Those of a tensor that was (batch, positions,
    # heads, width) and is transposed to (batch, heads, positions, width) are 0, 2, 1, 3.
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    whole = x.new_empty([x.shape[d] * (grid.tensor if d == dim else 1) for d in order])
    whole.bernoulli_(1 - p)
    slice_ = whole.narrow(order.index(dim), grid.part * own, own)
    mask = slice_.permute([order.index(d) for d in range(x.dim())])
    return mask / (1 - p) if p < 1 else mask  # of zeros


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention whose dropout mask is a slice; without dropout PyTorch's own, whose kernels draw inside."""
    if dropout_p == 0.0 or options.get("enable_gqa"):
        if dropout_p:
            raise ValueError(
                "dropout of attention with enable_gqa=True cannot be split over parts; repeat keys and values instead"
            )
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
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
    attended: Tensor = (weights * _mask(weights, dropout_p)) @ value
    return attended
