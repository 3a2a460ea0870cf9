"""Recomputation as one autograd node: ``CheckpointFunction``, and PyTorch's reentrant checkpoint for any arguments and results.

In PyTorch's reentrant variant each region adds to the gradients of its parameters by itself, so a parameter
that several regions use is accumulated once per region. ``CheckpointFunction`` has the parameters among its inputs and
returns their gradients like those of any other input; autograd adds them up and every parameter's gradient is final
when it is first touched. The idea, the name and the call are those of the pytorch-checkpoint project (csrhddlam).

PyTorch's reentrant checkpoint takes positional tensors only, drops the gradients of the parameters when no input
requires one, and hands zeros instead of nothing to the parameters behind an output that nobody used. Here arguments and
results may be nested structures with tensors anywhere in them, and gradients come out as they would without
recomputation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction as _TorchFunction

from hvd_ckpt.frames import keeps_everything
from hvd_ckpt.recompute.region import Region, reach
from hvd_ckpt.torch_private import get_autocast_kwargs, infer_device_type, pytree


class CheckpointFunction(torch.autograd.Function):
    """``CheckpointFunction.apply(function, n, *args)`` is ``function(*args[:n])``, recomputed in the backward
    pass.

    Arguments:
        function: takes the first n arguments, gives a tensor or a tuple of tensors. What it uses besides, its
            parameters, it has by itself (a bound method, a closure).
        n: how many of ``args`` are inputs; they may be anything.
        args: the inputs, then every parameter that the function uses.

    Random state, autocast state and devices in the recomputation are those of the first pass, and side
    effects happen once, as in :func:`hvd_ckpt.checkpoint`. ``retain_graph`` works; gradients of gradients do
    not.

    Raises:
        TypeError: ``function`` cannot be called, ``n`` is not an int, or an argument after the first n is not
            a tensor.
        ValueError: ``n`` is negative or larger than the number of arguments.
        RuntimeError (in the backward pass): the function uses a parameter that is not among ``args``, whose
            gradient would be lost, or none of its outputs needs gradients.
    """

    @classmethod
    def apply(cls, function: Any, n: int, *args: Any) -> Any:
        """``function(*args[:n])``; see the class."""
        if not keeps_everything():
            return super().apply(function, n, *args)  # type: ignore[no-untyped-call]
        _check(function, n, args)
        outputs = function(*args[:n])
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def forward(ctx: Any, function: Any, n: int, *args: Any) -> Any:
        _check(function, n, args)
        ctx.set_materialize_grads(False)
        ctx.n = n
        tensors, ctx.with_tensors = _apart(args)
        ctx.save_for_backward(*tensors)
        ctx.environment = _Environment(args[:n])
        ctx.region = Region(function, reach(function, args[:n]))
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
        args = ctx.with_tensors(ctx.saved_tensors)
        needed = ctx.needs_input_grad[2:]
        inputs = [
            arg.detach().requires_grad_(wanted) if isinstance(arg, torch.Tensor) else arg
            for arg, wanted in zip(args[: ctx.n], needed)
        ]
        with ctx.environment.restored(), torch.enable_grad():
            outputs = ctx.region(*inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
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
        result: list[torch.Tensor | None] = [None] * (2 + len(args))
        if not pairs:
            return tuple(result)
        arguments = [*inputs, *args[ctx.n :]]
        wanted = [index for index, need in enumerate(needed) if need]
        targets = [arguments[index] for index in wanted]
        ends = {get_gradient_edge(target).node for target in targets}
        if not ctx.checked:
            _check_all_listed([output for output, _ in pairs], ends)
            ctx.checked = True
        with _without_hooks(ends):
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                targets,
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
        for index, gradient in zip(wanted, found):
            result[2 + index] = gradient
        return tuple(result)


def _apart(values: Sequence[Any]) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], list[Any]]]:
    """The tensors among some values, and a function that gives the values with other tensors in their place."""
    is_tensor = [isinstance(value, torch.Tensor) for value in values]
    others = [None if tensor else value for value, tensor in zip(values, is_tensor)]

    def with_tensors(tensors: Iterable[torch.Tensor]) -> list[Any]:
        remaining = iter(tensors)
        return [next(remaining) if tensor else other for other, tensor in zip(others, is_tensor)]

    return [value for value in values if isinstance(value, torch.Tensor)], with_tensors


class _Environment:
    """The random and autocast state at a moment, to come back to."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.device_type: str = infer_device_type(*inputs)  # type: ignore[no-untyped-call]
        self.autocast, self.cpu_autocast = get_autocast_kwargs(self.device_type)  # type: ignore[no-untyped-call]
        self.cpu_state = torch.get_rng_state()
        self.devices: list[int] = []
        self.device_states: list[torch.Tensor] = []
        if getattr(getattr(torch, self.device_type, None), "_initialized", False):
            self.devices, self.device_states = torch_checkpoint.get_device_states(*inputs)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=self.device_type))
            torch.set_rng_state(self.cpu_state)
            if self.devices:
                torch_checkpoint.set_device_states(
                    self.devices, self.device_states, device_type=self.device_type
                )
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device_type, **self.autocast))
            stack.enter_context(torch.autocast("cpu", **self.cpu_autocast))
            yield


@contextlib.contextmanager
def _without_hooks(ends: Iterable[Node]) -> Iterator[None]:
    """Keeps the hooks on the leaves among ``ends`` from running on gradients that are not theirs yet: autograd
    calls them when the sum of all contributions arrives, and a hook that changes the gradient must not do so
    twice."""
    with contextlib.ExitStack() as restore:
        for end in ends:
            leaf = _leaf(end)
            hooks = None if leaf is None else leaf._backward_hooks
            if hooks:
                restore.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _leaf(node: Node) -> torch.Tensor | None:
    """The tensor that a node accumulates into; None for a node that computes something."""
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
    """Every leaf that the recomputed graph leads to must be among ``ends``: the gradient of any other would be
    lost."""
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


def checkpoint_reentrant(
    region: Region, preserve_rng_state: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``region(*args, **kwargs)``, recomputed by the reentrant variant. At least one parameter must require a
    gradient, or one tensor in the arguments."""
    run = _FlatRun(region, args, kwargs)
    tensors = list(run.tensors)
    if not any(tensor.requires_grad for tensor in tensors):
        # Without an input that requires grad autograd would not record the call at all.
        run.anchored = True
        tensors.append(torch.zeros((), requires_grad=True))
    leaves = _ReentrantCheckpoint.apply(run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]
    run.release_first_pass()
    return pytree.tree_unflatten(list(leaves), run.result_structure)


class _FlatRun:
    """The region as a function from a flat list of tensors to a flat tuple of results."""

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self.tensors, self._with_tensors = _apart(leaves)
        self._region = region
        # The first pass gets the caller's own containers, so that what the function does to them is seen by
        # the caller.
        self._first_pass: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.result_structure: Any = None
        self.wanted: list[bool] | None = None
        self.anchored = False  # only a tensor of ours makes autograd record the call

    def release_first_pass(self) -> None:
        """Lets go of the arguments: autograd holds the tensors from here on."""
        self._first_pass = None
        self.tensors = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        if self._first_pass is not None:
            args, kwargs = self._first_pass
            leaves, self.result_structure = pytree.tree_flatten(self._region(*args, **kwargs))
            return tuple(leaves)
        args, kwargs = pytree.tree_unflatten(self._with_tensors(tensors), self._structure)
        results, _ = pytree.tree_flatten(self._region(*args, **kwargs))
        return self._only_wanted(results, tensors)

    def _only_wanted(self, results: list[Any], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The recomputed results, cut from the graph where no gradient arrived, so that what lies behind them
        gets none.

        PyTorch refuses to go backward when no result requires grad. That is right where an argument does, and nothing
        else would say that its gradient is lost. It is wrong where a gradient arrived only for results that need none
        beside one that does, or where the parameters within reach turn out to be frozen or unused; then one result is
        tied to an input that requires grad, which gets no gradient from it.
        """
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


class _ReentrantCheckpoint(_TorchFunction):
    """PyTorch's function; it tells the run which results a gradient arrived for."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], preserve_rng_state: bool, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return _TorchFunction.forward(ctx, run, preserve_rng_state, *tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.run_function.wanted = [gradient is not None for gradient in gradients]
        if not any(ctx.run_function.wanted):
            return (None,) * len(ctx.needs_input_grad)
        return _TorchFunction.backward(ctx, *gradients)  # type: ignore[no-untyped-call]


class _Tie(torch.autograd.Function):
    """Identity of ``result`` that makes it require grad; the gradient reaches nobody new."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
