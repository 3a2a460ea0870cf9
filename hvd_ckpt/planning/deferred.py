"""Deferred logits: a head that is computed in chunks, in a model whose code stays as it is.

A linear layer to which a plan gives a number of chunks returns :class:`DeferredLogits`: a tensor with the shape, dtype and device
of its result, and without memory. ``functional.cross_entropy`` of it is computed chunk by chunk
(:mod:`hvd_ckpt.recompute.cross_entropy`), also behind a view, a slice of its rows or ``float()``, and so is ``argmax`` over the
vocabulary. Any other function gets the logits themselves, which are then computed as the layer would have done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.recompute.cross_entropy import REDUCTIONS, LossOptions, Product, cross_entropy_of
from hvd_ckpt.recompute.environment import Modes
from hvd_ckpt.utils.frames import is_checkpointing, is_recomputing
from hvd_ckpt.utils.torch_private import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    disable_dynamo,
    identity_of,
    untraceable,
)
from hvd_ckpt.utils.unmaterialized import is_split

# These need no values.
_FACTS = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad"}
_SIZES = {
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "ndimension", "nelement", "numel", "size",
}  # fmt: skip
_VIEWS = {"contiguous", "flatten", "reshape", "view", "view_as"}  # these keep the order of the elements


@dataclass(eq=False)
class DeferredCall:
    """A call of a linear layer that is not computed yet.

    Attributes:
        head: the layer.
        product: its input and its parameters.
        chunks: number of chunks of the cross entropy.
        grad: whether gradients were enabled.
        versions: versions of the tensors in ``product``, which must not be changed before the loss.
        uses: gets the uses of the logits, if it is a list.
    """

    head: nn.Linear
    product: Product
    chunks: int
    grad: bool
    versions: tuple[int, ...]
    uses: list[Use] | None = None

    def checked(self) -> Product:
        """The product, whose tensors are unchanged.

        Raises:
            RuntimeError: one of them was changed in place.
        """
        if self.versions != _versions(self.product):
            raise RuntimeError(
                "the input or a parameter of a head that is computed in chunks was changed in place before its loss: compute the "
                "loss first, or make the plan with chunk_head=False"
            )
        return self.product

    def with_hidden(self, hidden: Tensor) -> DeferredCall:
        """The same call for other rows, which are a view or a selection of its own."""
        product = self.checked()._replace(hidden=hidden)
        grad = self.grad and torch.is_grad_enabled()
        return replace(self, product=product, grad=grad, versions=_versions(product))

    def compute(self, product: Product, dtype: torch.dtype) -> Tensor:
        """All logits of a product."""
        with torch.autocast(product.hidden.device.type, enabled=False):
            return product.rows(product.hidden).to(dtype)


@dataclass(frozen=True)
class Use:
    """A use of deferred logits: a cross entropy with its dtype, targets and options, or, without targets, any other function, which
    needed the logits of the layer themselves."""

    call: DeferredCall
    dtype: torch.dtype
    targets: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)


def defer(
    head: nn.Linear,
    forward: Callable[..., Tensor],
    chunks: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Runs ``forward(head, *args, **kwargs)``, deferred if its loss can be computed in chunks."""
    # Not deferred:
    #   inside a checkpointed region, since the loss outside of it would keep what the region recomputes;
    #   in compiled code, and under modes, which may compute something else than the layer and the loss do;
    #   in a training forward pass without gradients, such as the first pass of a reentrant region;
    #   in evaluation with parameters that are split over the ranks (stage 3), since these are freed before the loss.
    hidden = args[0] if len(args) == 1 and not kwargs else None
    grad = torch.is_grad_enabled()
    if (
        type(hidden) is not Tensor
        or not (grad or not (head.training or is_split(head.weight)))
        or torch.compiler.is_compiling()
        or Modes().may_change_results()
        or torch.is_inference_mode_enabled()
        or hidden.is_inference()  # inference tensors have no version
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
    """A tensor of nan in place of the logits, with the gradient of the layer.

    A gradient arrives here if the logits are given to another ``autograd.Function``, which takes the tensor as it is and computes
    the logits only inside.
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
            None if operand is None else operand.detach().requires_grad_(need)
            for operand, need in zip(given, ctx.needs_input_grad)
        ]
        wanted = [operand for operand in inputs if operand is not None and operand.requires_grad]
        with torch.enable_grad():
            product = ctx.call.product._replace(**dict(zip(("hidden", "weight", "bias"), inputs)))
            logits = ctx.call.compute(product, ctx.dtype)
        gradients = iter(torch.autograd.grad(logits, wanted, gradient))
        return (*(next(gradients) if need else None for need in ctx.needs_input_grad[:3]), None, None)


class DeferredLogits(Tensor):
    """The result of a :class:`DeferredCall`, which is computed when it is used.

    Attributes:
        call: the call that computes it.
        like: a tensor without memory, with the strides that the logits will have.
        view_of: the logits that these are a view of, and the function that takes the view; None for those of the layer itself.
        computed: the logits, once they are computed.
    """

    call: DeferredCall
    like: Tensor
    view_of: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None
    computed: Tensor | None

    @staticmethod
    def of(
        call: DeferredCall,
        dtype: torch.dtype,
        like: Tensor | None = None,
        view_of: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None,
    ) -> DeferredLogits:
        """The result of a call, converted to ``dtype``; the other arguments are attributes."""
        untraceable(DeferredLogits)
        with torch.set_grad_enabled(call.grad):
            values: Tensor = _NoValues.apply(*call.product[:3], call, dtype)  # type: ignore[no-untyped-call]
            made: Any = values.as_subclass(DeferredLogits)
        made.like = torch.empty(values.shape, dtype=dtype, device="meta") if like is None else like
        made.call, made.view_of, made.computed = call, view_of, None
        return made  # type: ignore[no-any-return]

    @property
    def is_deferred(self) -> bool:
        """Whether neither these logits nor those that they are a view of have been computed."""
        return self.computed is None and (self.view_of is None or self.view_of[0].is_deferred)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], DeferredLogits) and args[0].is_deferred:
            if name in _SIZES or (name == "__get__" and getattr(func.__self__, "__name__", "") in _FACTS):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            result = args[0].without_logits(func, name, args, kwargs)
            if result is not None:
                return result
        args, kwargs = map_tensors(lambda logits: logits.result(), DeferredLogits, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def result(self) -> Tensor:
        """The logits as the layer computes them, which stay in memory from then on."""
        call = self.call
        if self.computed is None:
            with DisableTorchFunctionSubclass():
                dtype = self.dtype
            with torch.set_grad_enabled(call.grad):
                if self.view_of is None:
                    if call.uses is not None:
                        call.uses.append(Use(call, dtype))
                    self.computed = call.compute(call.checked(), dtype)
                else:
                    source, view = self.view_of
                    self.computed = view(source.result())
        return self.computed

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the logits are computed from, (..., width)."""
        return self.call.product.hidden

    @disable_dynamo
    def without_logits(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """The result of a function that needs no logits, or those of one chunk at a time; None for any other function."""
        call = self.call
        # Three kinds of functions: those that end the chain (cross entropy, argmax), which run chunk by chunk; conversions to the
        # same dtype or to float32; and views and selections of rows, which apply to the hidden states as well. ``like`` follows the
        # views, so that shapes and strides come from PyTorch itself.
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
            return DeferredLogits.of(call.with_hidden(call.product.hidden), torch.float32)
        hidden, like = call.product.hidden, None
        if name in _VIEWS:
            like = func(self.like, *args[1:], **kwargs)
            if like.shape[-1:] != shape[-1:] or like.dtype != dtype:
                return None
            hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
        elif name == "__getitem__" and self._of_rows(args[1], shape):
            hidden = hidden[args[1]]
            like = None if isinstance(args[1], Tensor) else self.like[args[1]]
        else:
            return None
        # A view of the logits stays one: whoever changes the one in place changes the other.
        shares = like is not None and identity_of(like.untyped_storage()) == identity_of(
            self.like.untyped_storage()
        )
        view = (self, lambda result: func(result, *args[1:], **kwargs)) if shares else None
        return DeferredLogits.of(call.with_hidden(hidden), dtype, like, view)

    def _of_rows(self, index: Any, shape: torch.Size) -> bool:
        """Whether an index chooses rows and keeps the last dimension whole, whose number of logits and of hidden states differ."""
        if isinstance(index, Tensor):
            return (index.dim() if index.dtype in (torch.bool, torch.uint8) else 1) < len(shape)
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, (int, slice, type(None), type(Ellipsis))) for part in parts):
            return False
        # One length does not tell the last dimension: there may be as many positions as logits, or a slice up to the last logit. An
        # index that keeps it whole does so for one logit more, and takes the same rows.
        left = self.like[index].shape
        more = torch.empty((*shape[:-1], shape[-1] + 1), device="meta")[index].shape
        return len(left) > 1 and (*left[:-1], left[-1] + 1) == tuple(more) and left[-1:] == shape[-1:]

    def _cross_entropy(
        self, shape: torch.Size, dtype: torch.dtype, targets: Any, options: dict[str, Any]
    ) -> Tensor | None:
        options, call = dict(options), self.call
        unusual = [options.pop(name, None) for name in ("weight", "size_average", "reduce")]
        if (
            any(option is not None for option in unusual)
            or len(shape) != 2
            or not isinstance(targets, Tensor)
            or targets.dtype != torch.int64
            or targets.shape != shape[:1]
            or options.get("reduction") not in REDUCTIONS
            or Modes().may_change_results()
        ):
            return None
        if call.uses is not None:
            call.uses.append(Use(call, dtype, targets, options))
        product = call.checked()
        if torch.is_autocast_enabled(product.hidden.device.type):
            dtype = torch.float32
        with torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
            return cross_entropy_of(product, targets, call.chunks, dtype, LossOptions(**options))

    def _argmax(self, shape: torch.Size) -> Tensor:
        product = self.call.checked()
        with torch.no_grad(), torch.autocast(product.hidden.device.type, enabled=False):
            parts = product.hidden.flatten(0, -2).tensor_split(self.call.chunks)
            return torch.cat([product.rows(part).argmax(-1) for part in parts]).view(shape[:-1])


def _versions(product: Product) -> tuple[int, ...]:
    return tuple(operand._version for operand in product[:3] if operand is not None)
