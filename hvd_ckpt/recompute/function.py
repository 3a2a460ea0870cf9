"""``CheckpointFunction``: recomputation as one autograd node that has the parameters among its inputs.

In PyTorch's reentrant variant, each region adds to the gradients of its parameters by itself, so a parameter that several regions
use accumulates once for each region. ``CheckpointFunction`` returns the gradients of its parameters like those of any other input.
Autograd adds them up, and each parameter's gradient is final when it accumulates. The idea, the name and the call are those of the
pytorch-checkpoint project (csrhddlam).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from hvd_ckpt.recompute.containers import Arguments
from hvd_ckpt.recompute.keeper import RandomState, autocast_context, autocast_state
from hvd_ckpt.recompute.region import Region, reach
from hvd_ckpt.recompute.state import requiring_grad
from hvd_ckpt.utils.frames import keeps_everything
from hvd_ckpt.utils.torch_private import infer_device_type


class CheckpointFunction(torch.autograd.Function):
    """``CheckpointFunction.apply(function, n, *args)`` runs ``function(*args[:n])`` and recomputes it in the backward pass.

    Args:
        function: takes the first n arguments and returns a tensor or a tuple of tensors. It reaches its parameters by itself (as a
            bound method or a closure).
        n: number of ``args`` that are inputs. Inputs may be any values.
        args: the inputs, followed by every parameter that the function uses.

    The recomputation runs with the random state, autocast state and devices of the first pass. Side effects happen once, as in
    :func:`hvd_ckpt.checkpoint`. ``retain_graph`` is supported; gradients of gradients are not.

    Raises:
        TypeError: ``function`` cannot be called, ``n`` is not an int, or an argument after the first n is not a tensor.
        ValueError: ``n`` is negative or larger than the number of arguments.
        RuntimeError (in the backward pass): the function uses a parameter that is not among ``args``, so its gradient would be
            lost, or none of its outputs requires a gradient.
    """

    @classmethod
    def apply(cls, function: Any, n: int, *args: Any) -> Any:
        """Runs ``function(*args[:n])``; see the class."""
        if torch.is_grad_enabled() and not keeps_everything():
            return super().apply(function, n, *args)  # type: ignore[no-untyped-call]
        _check(function, n, args)
        outputs = function(*args[:n])
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def forward(ctx: Any, function: Any, n: int, *args: Any) -> Any:
        _check(function, n, args)
        # An output without a gradient is left out below. Zeros would flow back to parameters that have no gradient.
        ctx.set_materialize_grads(False)
        ctx.n = n
        # Autograd holds the tensors, also those in containers, and raises an error if one of them was changed in place since.
        ctx.arguments = Arguments(args)
        ctx.save_for_backward(*ctx.arguments.tensors)
        ctx.environment = _environment({tensor.device: tensor for tensor in ctx.arguments.tensors}.values())
        ctx.arguments.tensors = []
        ctx.region = Region(function, reach(function, args[:n]), variant="CheckpointFunction")
        ctx.checked = False
        outputs = ctx.region(*args[:n])  # autograd calls this with gradients off
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "CheckpointFunction gives no gradients of gradients (create_graph=True): use checkpoint(function, "
                "*args, use_reentrant=False), which does."
            )
        args = ctx.arguments.rebuild(ctx.saved_tensors)
        needed = ctx.needs_input_grad[2:]
        # Detached inputs and the parameters themselves are the ends of the recomputed graph. autograd.grad() returns their
        # gradients and accumulates nothing. The outer graph adds the contributions of all regions, and then accumulates each sum
        # once.
        detached = {
            id(arg): arg.detach().requires_grad_(wanted)
            for arg, wanted in zip(args[: ctx.n], needed)
            if isinstance(arg, torch.Tensor)
        }
        inputs = [detached.get(id(arg), arg) for arg in args[: ctx.n]]
        result: list[torch.Tensor | None] = [None] * (2 + len(args))
        # The parameters that the gradients are asked for are those of the forward pass, frozen or unfrozen since.
        with requiring_grad(args[ctx.n :], list(needed[ctx.n :])):
            with ctx.environment(), torch.enable_grad():
                outputs = ctx.region(*inputs)
            outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            if not any(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs):
                raise RuntimeError(
                    "No output of the function given to CheckpointFunction has requires_grad=True when it is recomputed, "
                    "though its arguments do, so their gradients would be lost: call it without CheckpointFunction."
                )
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients)
                if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad
            ]
            if not pairs:
                return tuple(result)
            # A tensor that is given twice, such as a tied weight, gets its gradient once.
            places = {
                id(arg): (2 + at, arg) for at, arg in enumerate([*inputs, *args[ctx.n :]]) if needed[at]
            }
            targets = [arg for _, arg in places.values()]
            ends = {get_gradient_edge(target).node for target in targets}
            if not ctx.checked:
                _check_all_listed([output for output, _ in pairs], ends)
                # The graph of a further recomputation is the same, and a walk through all of it takes time.
                ctx.checked = True
            with _without_hooks(targets):
                kept, incoming = zip(*pairs)
                computed = torch.autograd.grad(kept, targets, incoming, allow_unused=True)
        for (place, _), gradient in zip(places.values(), computed):
            result[place] = gradient
        return tuple(result)


def _environment(tensors: Iterable[torch.Tensor]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes a context with the current random state and autocast state, on the devices of some tensors."""
    autocast = autocast_state(infer_device_type(*tensors))  # type: ignore[no-untyped-call]
    random, cache = RandomState(*tensors), torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with random(), autocast_context(autocast, cache):
            yield

    return context


@contextlib.contextmanager
def _without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which the hooks on tensors do not run.

    Autograd calls a hook with the sum of all contributions to a gradient. Here only one contribution is known, and a hook that
    changes the gradient must not change it twice.
    """
    with contextlib.ExitStack() as restore:
        for tensor in tensors:
            if hooks := tensor._backward_hooks:
                restore.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _leaf(node: Node) -> torch.Tensor | None:
    """The leaf that a node accumulates into; None for other nodes."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) and not node.next_functions else None


def _check(function: Any, n: Any, args: Sequence[Any]) -> None:
    if not callable(function):
        raise TypeError(f"CheckpointFunction needs something to call, got {type(function).__name__}.")
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"The number of inputs must be an int, got {n!r}.")
    if not 0 <= n <= len(args):
        raise ValueError(
            f"The number of inputs must be between 0 and the {len(args)} arguments given, got {n}."
        )
    for position, arg in enumerate(args[n:]):
        if not isinstance(arg, torch.Tensor):
            raise TypeError(
                f"Arguments after the first {n} are parameters and must be tensors, got {type(arg).__name__} at "
                f"position {n + position}."
            )


def _check_all_listed(outputs: Sequence[torch.Tensor], ends: set[Node]) -> None:
    """Raises RuntimeError if the recomputed graph leads to a leaf that is not among ``ends``, whose gradient would be lost."""
    seen = set(ends)
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = _leaf(node)
        if leaf is not None:
            raise RuntimeError(
                f"The function given to CheckpointFunction uses a parameter of shape {tuple(leaf.shape)} that is "
                "not among its arguments, so its gradient would be lost: pass every parameter the function uses "
                "after its inputs."
            )
        pending.extend(following for following, _ in node.next_functions if following is not None)
