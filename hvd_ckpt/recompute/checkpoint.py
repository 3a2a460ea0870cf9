"""``checkpoint``: keeps the inputs of a function and recomputes everything else in the backward pass.

The method is that of Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016). PyTorch does the
recomputation itself (:func:`torch.utils.checkpoint.checkpoint`, both variants). The code here makes side effects happen once
(running statistics, collectives, code that asks :func:`is_recomputing`), and lets both variants take any arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import (
    CheckpointFunction as _TorchFunction,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from hvd_ckpt.processes.partition import partitioned
from hvd_ckpt.recompute.containers import Arguments, flatten
from hvd_ckpt.recompute.region import Reach, Region, reach, refuse_transforms
from hvd_ckpt.recompute.state import requires_grad_of, requiring_grad
from hvd_ckpt.utils.frames import keeps_everything
from hvd_ckpt.utils.torch_private import disable_dynamo

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Options:
    """Options of a recomputation: the keyword arguments of :func:`checkpoint`."""

    use_reentrant: bool | None = False
    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    partition: bool = False

    def __post_init__(self) -> None:
        if self.use_reentrant not in (None, True, False):
            raise TypeError(f"use_reentrant must be True or False, got {self.use_reentrant!r}.")
        if self.use_reentrant and (self.context_fn is not noop_context_fn or self.debug):
            raise ValueError(
                "context_fn and debug need use_reentrant=False: the reentrant variant has neither."
            )


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    partition: bool = False,
    **kwargs: Any,
) -> Any:
    """Runs ``function(*args, **kwargs)`` and keeps its arguments instead of its activations.

    Takes the arguments of :func:`torch.utils.checkpoint.checkpoint` with the same meaning. Beyond that, both variants support:

    - keyword arguments, nested structures and non-tensors;
    - gradients of the parameters if no input requires a gradient (the first layers on raw data);
    - batch norms, which count each batch once, and synchronized batch norms, which communicate once;
    - modules whose training flags change before the backward pass: the recomputation uses those of the first pass;
    - parameters that are frozen, unfrozen or replaced before the backward pass (as :func:`torch.func.functional_call` does), with
      the gradients of plain autograd.

    The last three apply to modules that ``function`` can reach. These are the function itself, and modules in its object, closure,
    defaults, partial arguments, globals (also in lists and dicts of those), and in its arguments.

    Under :class:`torch.no_grad` and :func:`hvd_ckpt.without_recomputation`, the function runs without a checkpoint. While a model
    is being compiled, it runs eagerly. The function itself may be a compiled one.

    Args:
        function: a module or any callable. It must compute the same each time it runs.
        use_reentrant: False for the non-reentrant variant, which stops recomputing at the last tensor that is needed, and works
            with :func:`torch.autograd.grad`. True for the reentrant variant, which does neither, and which scripted modules need:
            TorchScript saves other tensors once it has optimized them. None means False, without a warning (in PyTorch it means
            True, with a warning).
        partition: whether each part of a job with tensor parallelism keeps 1 / t of each argument that requires grad, and the
            backward pass gathers them (partitioned activations of ZeRO-R). The arguments must be equal on all parts.
        preserve_rng_state: whether to recompute with the random state of the first pass, on the CPU and on every device of the
            arguments.
        context_fn, determinism_check, debug, early_stop: as in PyTorch; non-reentrant only.

    In the non-reentrant variant, results equal those without recomputation bit for bit. In the reentrant variant, they do in
    float32 under three conditions. No parameter is used twice. No tensor is an argument of several calls, as gradients are then
    added in another order. Every operation uses the same kernel with and without gradients, which ``nn.LSTM`` on CPU does not.

    Raises:
        TypeError: ``function`` cannot be called, or ``use_reentrant`` is not a bool.
        ValueError: ``context_fn`` or ``debug`` is given with the reentrant variant, or ``determinism_check`` is unknown.
        RuntimeError (in the backward pass of the reentrant variant): an argument requires gradients, but no result of
            ``function`` does.
    """
    options = Options(
        use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop, partition
    )
    return run_checkpointed(function, args, kwargs, options)


_DEFAULTS = Options()


@disable_dynamo
def run_checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options = _DEFAULTS
) -> Any:
    """:func:`checkpoint` for callers whose own keyword arguments might bear the names of its options."""
    if not callable(function):
        raise TypeError(f"checkpoint needs something to call, got {type(function).__name__}.")
    if not torch.is_grad_enabled() or keeps_everything():
        return function(*args, **kwargs)
    refuse_transforms(function, args, kwargs)
    with partitioned() if options.partition else nullcontext():
        return _run(function, args, kwargs, options)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    reached = reach(function, args, kwargs)
    run = _FlatRun(function, reached, args, kwargs, options)
    if options.use_reentrant:
        if not reached.requires_grad() and not _any_requires_grad(run.tensors):
            # Nothing within reach requires a gradient, so a plain call keeps no activations. It is also right if the function has
            # a parameter out of reach.
            return function(*args, **kwargs)
        return _checkpoint_reentrant(run, options.preserve_rng_state)
    # The argument early_stop of PyTorch's checkpoint exists only since PyTorch 2.9.
    with nullcontext() if options.early_stop else set_checkpoint_early_stop(False):
        result = torch.utils.checkpoint.checkpoint(
            run,
            *run.tensors,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            context_fn=noop_context_fn if options.context_fn is noop_context_fn else run.contexts,
            determinism_check=options.determinism_check,
            debug=options.debug,
        )
    run.release_first_pass()
    return result


class _FlatRun:
    """A region as a function of the tensors among its arguments.

    PyTorch's variants save these tensors with the graph, and raise an error if one of them was changed in place since. Containers
    are made again for each recomputation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reached: Reach,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        self._arguments = Arguments((args, kwargs))
        self.tensors = self._arguments.tensors
        self._flags = requires_grad_of(self.tensors)
        self._reentrant = bool(options.use_reentrant)
        self._context_fn = options.context_fn
        arguments = {id(tensor) for tensor in self.tensors}
        # PyTorch saves the arguments with the graph and raises an error where one was changed. They must not be restored here.
        reached.tensors = [tensor for tensor in reached.tensors if id(tensor) not in arguments]
        # With what else decides which parts of the function are run and compared again.
        variant = ("checkpoint", options.partition, options.context_fn is noop_context_fn)
        self.region = Region(
            function, reached, options.preserve_rng_state, saves=not self._reentrant, variant=variant
        )
        # The first pass gets the caller's own containers, so that the caller sees what the function does to them.
        self._first_pass: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.rebuild_result: Any = None
        self.wanted: list[bool] | None = None  # for each result, whether a gradient has arrived for it
        self.anchored = False  # whether autograd records the call only because of a tensor that was added
        self.gradients: list[torch.Tensor | None] = []  # of the tensors

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the caller's ``context_fn``, for the first pass and for each recomputation."""
        first, again = self._context_fn()
        return first, self.region.within(again)

    def release_first_pass(self) -> None:
        """Releases the arguments: from here on, autograd holds the tensors."""
        self._first_pass = None
        self.tensors = self._arguments.tensors = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        # PyTorch calls this for the first pass and for each recomputation. In the reentrant variant, results are flat tuples of
        # leaves too, since its autograd function takes and returns tensors only; rebuild_result puts them together again.
        first = self._first_pass
        if first is not None and not self.region.started:
            result = self.region(*first[0], **first[1])
            if self._reentrant:
                leaves, self.rebuild_result = flatten(result)
                return tuple(leaves)
            return result
        # Tensors that were added to the arguments have no flag here, and keep theirs.
        with requiring_grad(tensors[: len(self._flags)], self._flags):
            return self._recompute(tensors)

    def _recompute(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        self.gradients = [None] * len(tensors)
        given = list(tensors)
        for place, tensor in enumerate(tensors if self._reentrant else ()):
            if tensor.requires_grad:
                given[place] = _Input.apply(tensor, self.gradients, place)  # type: ignore[no-untyped-call]
        args, kwargs = self._arguments.rebuild(given)
        result = self.region(*args, **kwargs)
        if not self._reentrant:
            return result
        results = flatten(result)[0]
        _check_returned(flatten((args, kwargs))[0], results)
        return self._only_wanted(results, tensors)

    def _only_wanted(self, results: list[Any], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The recomputed results, of which those without a gradient are detached, so that nothing behind them gets a gradient."""
        # PyTorch raises an error if no result requires a gradient. That is right if an argument requires one, since its gradient
        # would be lost without a word. It is wrong in two cases: a gradient has arrived only for results that need none, while
        # another result does; and the parameters within reach are frozen or unused. In these cases, one result is tied to an input
        # that requires a gradient and gets none from it.
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


# The reentrant variant.
#
# PyTorch's own takes positional tensors only, drops the gradients of the parameters if no input requires one, and gives zeros
# instead of no gradient to the parameters behind an unused output. The code below removes these limits: arguments and results may
# be nested structures with tensors anywhere in them, and gradients are those without recomputation.


def _checkpoint_reentrant(run: _FlatRun, preserve_rng_state: bool) -> Any:
    """The result of the region, which the reentrant variant recomputes. A parameter or an argument must require a gradient."""
    tensors = list(run.tensors)
    if not any(tensor.requires_grad for tensor in tensors):
        # Without an input that requires a gradient, autograd would not record the call.
        run.anchored = True
        tensors.append(torch.zeros((), requires_grad=True, dtype=torch.float32))
    leaves = _ReentrantCheckpoint.apply(run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]
    run.release_first_pass()
    return run.rebuild_result(list(leaves))


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


class _ReentrantCheckpoint(_TorchFunction):
    """PyTorch's reentrant checkpoint, which also notes in the run for which results a gradient has arrived."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], preserve_rng_state: bool, *tensors: torch.Tensor) -> Any:
        # So that a result without a gradient is told from one whose gradient is zero: see ``wanted``.
        ctx.set_materialize_grads(False)
        return _TorchFunction.forward(ctx, run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.run_function.wanted = [gradient is not None for gradient in gradients]
        if not any(ctx.run_function.wanted):
            return (None,) * len(ctx.needs_input_grad)
        _TorchFunction.backward(ctx, *gradients)  # type: ignore[no-untyped-call]
        return None, None, *ctx.run_function.gradients


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


class _Tie(torch.autograd.Function):
    """Identity that makes ``result`` require a gradient. ``anchor`` gets no gradient from it."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
