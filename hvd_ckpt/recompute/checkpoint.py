"""``checkpoint``: keeps the inputs of a function and recomputes everything else in the backward pass.

The method is that of Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016). In the non-reentrant
variant, :func:`torch.utils.checkpoint.checkpoint` recomputes a :class:`.region.Region`, which makes side effects happen once
(running statistics, collectives, code that asks :func:`is_recomputing`) and takes any arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn, set_checkpoint_early_stop

from hvd_ckpt.processes.partition import partitioned
from hvd_ckpt.recompute.reach import reach, refuse_transforms
from hvd_ckpt.recompute.reentrant import any_requires_grad, run_reentrant
from hvd_ckpt.recompute.region import ContextFn, Options, Region
from hvd_ckpt.utils.frames import keeps_everything
from hvd_ckpt.utils.torch_private import disable_dynamo


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
            ``function`` does; or the backward pass is that of :func:`torch.autograd.grad`, or has ``create_graph=True``.
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
    region = Region(function, args, kwargs, reached, options)
    if options.use_reentrant:
        if not reached.requires_grad() and not any_requires_grad(region.tensors):
            # Nothing within reach requires a gradient, so a plain call keeps no activations. It is also right if the function has
            # a parameter out of reach.
            return function(*args, **kwargs)
        return run_reentrant(region)
    # The argument early_stop of PyTorch's checkpoint exists only since PyTorch 2.9.
    with nullcontext() if options.early_stop else set_checkpoint_early_stop(False):
        result = torch.utils.checkpoint.checkpoint(
            region,
            *region.tensors,
            use_reentrant=False,
            preserve_rng_state=False,  # the region preserves it
            determinism_check=options.determinism_check,
            debug=options.debug,
        )
    region.release_first_pass()
    return result
