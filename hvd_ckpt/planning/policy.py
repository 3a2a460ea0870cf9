"""Checkpoint policies, which decide what the forward pass of a block keeps, and their application to modules.

A module gets a subclass of its own class whose ``forward`` runs the original ``forward`` under the policy. So it keeps its
identity, parameters, hooks and ``state_dict``, remains an instance of its class, and can be copied and pickled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import nn

from hvd_ckpt.planning.deferred import defer
from hvd_ckpt.recompute.checkpoint import run_checkpointed
from hvd_ckpt.recompute.sequential import places_of
from hvd_ckpt.recompute.tape import Policy, run_selectively
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.schema import shown
from hvd_ckpt.utils.torch_private import is_compiled


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{shown(text)} must be printable")
    return text


Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""A text of a plan file that can be printed."""

_POLICY = (
    "_hvd_ckpt_policy"  # a CheckpointPolicy, or the items of a chain by the name of the first child of each
)
_AUTOCAST = "_hvd_ckpt_autocast"
_ENTRIES = (_POLICY, _AUTOCAST)


@dataclass(frozen=True)
class CheckpointPolicy:
    """Decision about what the forward pass of a block keeps for its backward pass.

    Attributes:
        title: a title for people: ``keep``, ``drop gelu, layer_norm``, ``recompute``.
        selective: the calls whose results are dropped, and how the other results are kept; or None.
        recompute: whether to keep only the inputs and recompute everything (for compiled blocks, whose calls cannot be seen).
        chunks: for a head, the number of chunks of rows in which its cross entropy is computed.

    Raises:
        ValueError: a number in ``selective`` is not the number of a call.
    """

    title: Text
    selective: Policy | None = None
    recompute: bool = False
    chunks: Annotated[int, Field(ge=1, le=2**31)] | None = None

    def __post_init__(self) -> None:
        if self.selective is not None:
            count = len(self.selective.calls)
            for number in self.selective.dropped | self.selective.breaks:
                if not 0 <= number < count:
                    raise ValueError(
                        f"call {shown(number)} does not exist: there are {count} calls, numbered from 0"
                    )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)`` under this policy."""
        if self.recompute:
            return run_checkpointed(function, args, kwargs)
        if self.selective is not None:
            return run_selectively(function, args, kwargs, self.selective)
        return function(*args, **kwargs)


KEEP = CheckpointPolicy("keep")
RECOMPUTE = CheckpointPolicy("recompute", recompute=True)


def apply_policy(module: nn.Module, policy: CheckpointPolicy) -> None:
    """Makes ``module.forward`` run under ``policy``, in place of an earlier policy."""
    remove_policy(module)
    if policy != KEEP:
        # A compiled module runs compiled code in place of ``forward``, into which a
        # policy there would be traced. So its policy wraps the whole call.
        _put(module, policy, "__call__" if is_compiled(module) else "forward")


def apply_to_chain(module: nn.Module, items: Sequence[Any]) -> None:
    """Makes an ``nn.Sequential`` run some of its children under shared policies or in segments.

    Args:
        items: (names of children, policy) for consecutive children that share a policy, or a list of such items for a segment,
            which is recomputed as a whole. Other children are called as before.
    """
    remove_policy(module)
    _put(module, {_names(item)[0]: item for item in items}, "forward")


def _put(module: nn.Module, policy: CheckpointPolicy | dict[str, Any], method: str) -> None:
    module.__dict__[_POLICY] = policy
    module.__class__ = _with_policy(type(module), method)  # type: ignore[arg-type]


def remove_policy(module: nn.Module) -> None:
    """Restores the class of a module that has a policy."""
    if is_planned(module):
        module.__class__ = base_class(module)
        for name in _ENTRIES:
            module.__dict__.pop(name, None)


@contextlib.contextmanager
def without_policies(model: nn.Module) -> Iterator[None]:
    """A context in which no module of the model has a policy, to begin with; afterwards those with one before have it again."""
    before = [
        (module, type(module), {name: module.__dict__[name] for name in _ENTRIES if name in module.__dict__})
        for module in model.modules()
        if is_planned(module)
    ]
    for module, *_ in before:
        remove_policy(module)
    try:
        yield
    finally:
        for module, kind, own in before:
            module.__class__ = kind
            module.__dict__.update(own)


def expect_autocast(module: nn.Module, dtype: str | None) -> None:
    """Makes a module with a policy warn if it trains under another autocast than to ``dtype``; None means no autocast."""
    if is_planned(module):
        module.__dict__[_AUTOCAST] = dtype


def _check_autocast(module: nn.Module) -> None:
    if _AUTOCAST not in module.__dict__ or not torch.is_grad_enabled():
        return
    planned = module.__dict__[_AUTOCAST]
    kinds = (kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind))
    runs = next((str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds), None)
    if runs != planned:
        made, runs_so = (
            "without autocast" if dtype is None else f"under autocast to {dtype}" for dtype in (planned, runs)
        )
        run_warnings.warn(
            f"The plan was made {made}, and the model runs {runs_so}: its peak is another one, and may be over the budget. Make "
            f"the plan with hc.plan(..., autocast={'None' if runs is None else f'torch.{runs}'})."
        )


def policy_parts(module: nn.Module) -> list[list[nn.Module]]:
    """The modules that share a policy: the module itself, or the children of a chain that run together or in a segment."""
    policy = module.__dict__.get(_POLICY, {})
    if isinstance(policy, CheckpointPolicy):
        return [[module]]
    return [[module.get_submodule(name) for name in _names(item)] for item in policy.values()]


def is_planned(module: nn.Module) -> bool:
    """Whether the module itself, or some of its children together, run under a policy."""
    return _POLICY in module.__dict__


def in_chunks(chunks: int) -> CheckpointPolicy:
    """The policy of a head whose cross entropy is computed in ``chunks`` chunks of rows."""
    return CheckpointPolicy(f"cross entropy in {chunks} chunk{'s' * (chunks > 1)}", chunks=chunks)


def is_head(module: nn.Module) -> bool:
    """Whether the module is a head in chunks. The loss reads its weight after the module has run."""
    return getattr(module.__dict__.get(_POLICY), "chunks", None) is not None


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without a policy."""
    kind = type(module)
    return getattr(kind, "_hvd_ckpt_base", kind)


@functools.cache
def _with_policy(base: type[nn.Module], method: str) -> type[nn.Module]:
    """A class like ``base`` whose ``method`` runs under the module's policy. Copies and pickles make the class again."""
    # Made once for each class, so that modules of one class still have one class, by which a plan knows them.
    original = getattr(base, method)

    @functools.wraps(original)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        policy: CheckpointPolicy | dict[str, Any] | None = self.__dict__.get(_POLICY)
        if policy is None:  # a slice of an nn.Sequential has its class alone
            return original(self, *args, **kwargs)
        _check_autocast(self)
        if isinstance(policy, dict):
            return _run_chain(places_of(self), policy, *args, **kwargs)
        if policy.chunks is not None:
            return defer(self, original, policy.chunks, args, kwargs)  # type: ignore[arg-type]
        return policy.run(functools.partial(original, self), args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        getstate = getattr(base, "__getstate__", None)  # with Python 3.10 some classes alone have it
        return _new, (base, method), self.__dict__ if getstate is None else getstate(self)

    return type(
        base.__name__,
        (base,),
        {
            method: run,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": reduce,
            "_hvd_ckpt_base": base,
        },
    )


def _new(base: type[nn.Module], method: str) -> nn.Module:
    kind = _with_policy(base, method)  # type: ignore[arg-type]
    module: nn.Module = kind.__new__(kind)
    return module


def _run_chain(children: dict[str, nn.Module], items: dict[str, Any], input: Any) -> Any:
    # Children in no item run as they are, each under its own policy.
    names = list(children)
    position = 0
    while position < len(names):
        item = items.get(names[position], ((names[position],), KEEP))
        input = _run_item(children, item, input)
        position += len(_names(item))
    return input


def _run_item(children: dict[str, nn.Module], item: Any, input: Any) -> Any:
    if isinstance(item, list):  # a segment: its function must reach no other children
        inner = {name: children[name] for name in _names(item)}
        return run_checkpointed(functools.partial(_run_segment, inner, item), (input,), {})
    names, policy = item
    return policy.run(functools.partial(_call_all, [children[name] for name in names]), (input,), {})


def _run_segment(children: dict[str, nn.Module], items: list[Any], input: Any) -> Any:
    for item in items:
        input = _run_item(children, item, input)
    return input


def _call_all(modules: Sequence[nn.Module], input: Any) -> Any:
    for module in modules:
        input = module(input)
    return input


def _names(item: Any) -> list[str]:
    """Names of the children that an item runs, in order."""
    if isinstance(item, list):
        return [name for inner in item for name in _names(inner)]
    return list(item[0])
