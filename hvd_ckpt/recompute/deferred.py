"""Logits that wait for the cross entropy: how a head is computed in chunks in a model whose code stays as it is.

A linear layer that a plan gives a number of chunks returns :class:`DeferredLogits`: a tensor with the shape, dtype and device of
its result, and no memory. ``functional.cross_entropy`` of it, also behind a view, a slice of its rows or ``float()``, is computed
chunk by chunk (:mod:`hvd_ckpt.recompute.cross_entropy`), and so is ``argmax`` over the vocabulary. Everything else gets the result
itself, which is computed then, as the layer would have done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.frames import is_checkpointing, is_recomputing
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.recompute.cross_entropy import REDUCTIONS, Product, cross_entropy_of
from hvd_ckpt.torch_private import DisableTorchFunctionSubclass, current_graph_task_id
from hvd_ckpt.unmaterialized import is_split

_FACTS = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu"}  # attributes that need no values
_SIZES = {
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "ndimension", "nelement", "numel", "size",
}  # fmt: skip
_VIEWS = {"contiguous", "flatten", "reshape", "view", "view_as"}  # elements keep their order


@dataclass(frozen=True)
class DeferredCall:
    """A call of a linear layer that is not computed yet.

    Attributes:
        head: the layer.
        product: what it was given, with its parameters at that time.
        chunks: in which cross entropy is computed.
        grad: whether gradients were recorded.
        versions: of ``product``'s tensors, which nobody may change meanwhile.
    """

    head: nn.Linear
    product: Product
    chunks: int
    grad: bool
    versions: tuple[int, int]

    def checked(self) -> Product:
        """The product.

        Raises:
            RuntimeError: an input was changed in place.
        """
        if self.versions != _versions(self.product):
            raise RuntimeError(
                "the input or the weight of a head that is computed in chunks was changed in place before its loss: compute the "
                "loss first, or make the plan with chunk_head=False"
            )
        return self.product

    def with_hidden(self, hidden: Tensor) -> DeferredCall:
        """The same call of other rows, which are views or selections of its own."""
        product = self.product._replace(hidden=hidden)
        return DeferredCall(self.head, product, self.chunks, self.grad, _versions(product))


@dataclass(frozen=True)
class Consumed:
    """A cross entropy of deferred logits: the call, the dtype of the logits, targets and options."""

    call: DeferredCall
    dtype: torch.dtype
    targets: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """What became of deferred logits.

    Attributes:
        consumed: each cross entropy.
        computed: the layers of those that something else needed.
    """

    consumed: list[Consumed]
    computed: list[nn.Linear]


_listeners: list[Heard] = []


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Collects what becomes of deferred logits inside."""
    _listeners.append(Heard([], []))
    try:
        yield _listeners[-1]
    finally:
        _listeners.pop()


def defer(
    head: nn.Linear,
    forward: Callable[..., Tensor],
    chunks: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """``forward(head, *args, **kwargs)``, deferred where its loss can be computed in chunks.

    It is not inside a checkpointed region, where the loss, outside, would keep what the region recomputes; in compiled code; in a
    training forward pass without gradients, such as that of a reentrant region; or in evaluation where parameters are split over
    the ranks (stage 3), which free them as the model has run.
    """
    hidden = args[0] if len(args) == 1 and not kwargs else None
    grad = torch.is_grad_enabled()
    if (
        type(hidden) is not Tensor
        or not (grad or not (head.training or is_split(head.weight)))
        or torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or is_checkpointing()
        or is_recomputing()
        or current_graph_task_id() != -1
    ):
        return forward(head, *args, **kwargs)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    product = Product(hidden, head.weight, head.bias, dtype)
    return DeferredLogits.of(DeferredCall(head, product, chunks, grad, _versions(product)), dtype)


class DeferredLogits(Tensor):
    """The result of a :class:`DeferredCall` that is computed when it is used."""

    _call: DeferredCall
    _result: Tensor | None

    @staticmethod
    def of(call: DeferredCall, dtype: torch.dtype) -> DeferredLogits:
        """The result of a call, converted to ``dtype``."""
        product = call.product
        shape = (*product.hidden.shape[:-1], len(product.weight))
        # Whoever reads past __torch_function__ finds nan everywhere.
        nothing = torch.full((), torch.nan, dtype=dtype, device=product.hidden.device).expand(shape)
        made: Any = nothing.as_subclass(DeferredLogits)
        made._call, made._result = call, None
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], DeferredLogits) and args[0]._result is None:
            if name == "__get__" and getattr(func.__self__, "__name__", "") == "requires_grad":
                return args[0]._requires_grad()
            if name in _SIZES or (name == "__get__" and getattr(func.__self__, "__name__", "") in _FACTS):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            result = args[0]._deferred(func, name, args, kwargs)
            if result is not None:
                return result
        args, kwargs = map_tensors(lambda one: one.result(), DeferredLogits, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def result(self) -> Tensor:
        """The logits, as the layer computes them; from now on they are in memory."""
        if self._result is None:
            for heard in _listeners:
                heard.computed.append(self._call.head)
            with DisableTorchFunctionSubclass():
                dtype = self.dtype
            product = self._call.checked()
            with (
                torch.set_grad_enabled(self._call.grad),
                torch.autocast(product.hidden.device.type, enabled=False),
            ):
                self._result = product.rows(product.hidden).to(dtype)
        return self._result

    @property
    def hidden(self) -> Tensor:
        """What the logits are computed from, (..., width)."""
        return self._call.product.hidden

    def _requires_grad(self) -> bool:
        product = self._call.product
        return self._call.grad and any(
            one is not None and one.requires_grad for one in (product.hidden, product.weight, product.bias)
        )

    def _deferred(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """The result of a function that needs no logits, or those of a chunk; None for any other."""
        with DisableTorchFunctionSubclass():
            shape, dtype = self.shape, self.dtype
        if func is functional.cross_entropy:
            return self._cross_entropy(shape, dtype, args[1], kwargs)
        if name == "argmax" and (args[1:], kwargs) in (((-1,), {}), ((), {"dim": -1})) and len(shape) > 1:
            return self._argmax(shape)
        if name == "float" or (name == "to" and args[1:] in ((torch.float32,), (dtype,)) and not kwargs):
            same = name == "to" and args[1] == dtype
            return self if same or dtype == torch.float32 else DeferredLogits.of(self._call, torch.float32)
        hidden = self._call.product.hidden
        if name in _VIEWS:
            like = func(torch.empty(shape, dtype=dtype, device="meta"), *args[1:], **kwargs)
            if like.shape[-1:] != shape[-1:] or like.dtype != dtype:
                return None
            hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
        elif name == "__getitem__" and hidden.shape[-1] != shape[-1] and self._of_rows(args[1], shape):
            hidden = hidden[args[1]]
        else:
            return None
        return DeferredLogits.of(self._call.with_hidden(hidden), dtype)

    def _of_rows(self, index: Any, shape: torch.Size) -> bool:
        """Whether an index leaves the last dimension as it is."""
        if isinstance(index, Tensor):
            return (index.dim() if index.dtype == torch.bool else 1) < len(shape)
        if any(isinstance(one, (Tensor, list)) for one in (index if isinstance(index, tuple) else [index])):
            return False
        left = torch.empty(shape, device="meta")[index].shape
        return left[-1:] == shape[-1:] and len(left) > 1

    def _cross_entropy(
        self, shape: torch.Size, dtype: torch.dtype, targets: Any, options: dict[str, Any]
    ) -> Tensor | None:
        options = dict(options)
        unusual = [options.pop(name, None) for name in ("weight", "size_average", "reduce")]
        if (
            any(one is not None for one in unusual)
            or len(shape) != 2
            or not isinstance(targets, Tensor)
            or targets.dtype != torch.int64
            or targets.shape != shape[:1]
            or options.get("reduction") not in REDUCTIONS
        ):
            return None
        for heard in _listeners:
            heard.consumed.append(Consumed(self._call, dtype, targets, options))
        product = self._call.checked()
        if torch.is_autocast_enabled(product.hidden.device.type):
            dtype = torch.float32
        with torch.set_grad_enabled(self._call.grad and torch.is_grad_enabled()):
            return cross_entropy_of(product, targets, self._call.chunks, dtype, **options)

    def _argmax(self, shape: torch.Size) -> Tensor:
        product = self._call.checked()
        with torch.no_grad(), torch.autocast(product.hidden.device.type, enabled=False):
            parts = product.hidden.flatten(0, -2).tensor_split(self._call.chunks)
            return torch.cat([product.rows(part).argmax(-1) for part in parts if len(part)]).view(shape[:-1])


def _versions(product: Product) -> tuple[int, int]:
    return product.hidden._version, product.weight._version
