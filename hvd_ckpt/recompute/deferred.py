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

from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.recompute.cross_entropy import REDUCTIONS, Product, cross_entropy_of
from hvd_ckpt.torch_private import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    disable_dynamo,
    untraceable,
)
from hvd_ckpt.utils.frames import is_checkpointing, is_recomputing
from hvd_ckpt.utils.unmaterialized import is_split

_FACTS = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "requires_grad",
}  # need no values
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
    versions: tuple[int, ...]

    def checked(self) -> Product:
        """The product.

        Raises:
            RuntimeError: an input was changed in place.
        """
        if self.versions != _versions(self.product):
            raise RuntimeError(
                "the input or a parameter of a head that is computed in chunks was changed in place before its loss: compute the "
                "loss first, or make the plan with chunk_head=False"
            )
        return self.product

    def with_hidden(self, hidden: Tensor) -> DeferredCall:
        """The same call of other rows, which are views or selections of its own."""
        product = self.checked()._replace(hidden=hidden)
        return DeferredCall(
            self.head, product, self.chunks, self.grad and torch.is_grad_enabled(), _versions(product)
        )

    def compute(self, product: Product, dtype: torch.dtype) -> Tensor:
        """The logits of a product, all of them."""
        with torch.autocast(product.hidden.device.type, enabled=False):
            return product.rows(product.hidden).to(dtype)


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
    the ranks (stage 3), which free them as the model has run; or of a vocabulary parallel head.
    """
    hidden = args[0] if len(args) == 1 and not kwargs else None
    grad = torch.is_grad_enabled()
    if (
        type(hidden) is not Tensor
        or not (grad or not (head.training or is_split(head.weight)))
        or torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or hidden.is_inference()  # neither has a version
        or head.weight.is_inference()
        or is_checkpointing()
        or is_recomputing()
        or current_graph_task_id() != -1
        or hasattr(type(head), "vocabulary")  # of which this is only a part
    ):
        return forward(head, *args, **kwargs)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    product = Product(hidden, head.weight, head.bias, dtype)
    return DeferredLogits.of(DeferredCall(head, product, chunks, grad, _versions(product)), dtype)


class _NoValues(torch.autograd.Function):
    """A tensor of nan in place of the logits.

    A gradient comes back where they are given to somebody else's ``autograd.Function``, which takes them as they are and computes
    them only inside; it goes on as through the layer.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: DeferredCall, dtype: torch.dtype
    ) -> Tensor:
        ctx.call, ctx.dtype = call, dtype
        nothing = torch.full((), torch.nan, dtype=dtype, device=hidden.device)
        return nothing.expand(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = ctx.call.checked()[:3]
        inputs = [
            None if one is None else one.detach().requires_grad_(need)
            for one, need in zip(given, ctx.needs_input_grad)
        ]
        wanted = [one for one in inputs if one is not None and one.requires_grad]
        with torch.enable_grad():
            product = ctx.call.product._replace(**dict(zip(("hidden", "weight", "bias"), inputs)))
            logits = ctx.call.compute(product, ctx.dtype)
        found = iter(torch.autograd.grad(logits, wanted, gradient))
        return (*(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None)


class DeferredLogits(Tensor):
    """The result of a :class:`DeferredCall` that is computed when it is used."""

    _call: DeferredCall
    _result: Tensor | None
    _like: Tensor  # without memory, with the strides that the result will have
    # The logits that it is a view of, and how: who changes one changes the other.
    _view: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None

    @staticmethod
    def of(
        call: DeferredCall,
        dtype: torch.dtype,
        like: Tensor | None = None,
        view: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None,
    ) -> DeferredLogits:
        """The result of a call, converted to ``dtype``."""
        untraceable(DeferredLogits)
        with torch.set_grad_enabled(call.grad):
            made: Any = _NoValues.apply(*call.product[:3], call, dtype).as_subclass(DeferredLogits)  # type: ignore[no-untyped-call]
        made._call, made._result, made._view = call, None, view
        made._like = torch.empty(made.shape, dtype=dtype, device="meta") if like is None else like
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], DeferredLogits) and args[0]._is_deferred():
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
            with DisableTorchFunctionSubclass():
                dtype = self.dtype
            with torch.set_grad_enabled(self._call.grad):
                if self._view is None:
                    for heard in _listeners:
                        heard.computed.append(self._call.head)
                    self._result = self._call.compute(self._call.checked(), dtype)
                else:
                    source, view = self._view
                    self._result = view(source.result())
        return self._result

    def _is_deferred(self) -> bool:
        return self._result is None and (self._view is None or self._view[0]._is_deferred())

    @property
    def hidden(self) -> Tensor:
        """What the logits are computed from, (..., width)."""
        return self._call.product.hidden

    @disable_dynamo
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
            if same or dtype == torch.float32:
                return self
            return DeferredLogits.of(self._call.with_hidden(self._call.product.hidden), torch.float32)
        hidden, like = self._call.product.hidden, None
        if name in _VIEWS:
            like = func(self._like, *args[1:], **kwargs)
            if like.shape[-1:] != shape[-1:] or like.dtype != dtype:
                return None
            hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
        elif name == "__getitem__" and hidden.shape[-1] != shape[-1] and self._of_rows(args[1], shape):
            hidden = hidden[args[1]]
            like = None if isinstance(args[1], Tensor) else self._like[args[1]]
        else:
            return None
        shares = like is not None and like.untyped_storage()._cdata == self._like.untyped_storage()._cdata
        view = (self, lambda result: func(result, *args[1:], **kwargs)) if shares else None
        return DeferredLogits.of(self._call.with_hidden(hidden), dtype, like, view)

    def _of_rows(self, index: Any, shape: torch.Size) -> bool:
        """Whether an index leaves the last dimension as it is."""
        if isinstance(index, Tensor):
            return (index.dim() if index.dtype == torch.bool else 1) < len(shape)
        if any(isinstance(one, (Tensor, list)) for one in (index if isinstance(index, tuple) else [index])):
            return False
        left = self._like[index].shape
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


def _versions(product: Product) -> tuple[int, ...]:
    return tuple(one._version for one in product[:3] if one is not None)
