"""What can be done with a block, and how a module is made to do it.

A module gets a subclass of its own class whose ``forward`` runs the original one under the treatment. So it keeps its
identity, parameters, hooks and ``state_dict``, is still an instance of its class, and can be copied and pickled.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvd_ckpt.recompute.checkpoint import Options, run_checkpointed
from hvd_ckpt.recompute.tape import Policy, run_selectively

__all__ = [
    "KEEP",
    "Treatment",
    "base_class",
    "expect_autocast",
    "treat",
    "treat_chain",
    "treated_parts",
    "untreat",
]

_TREATMENT = "_hvd_ckpt_treatment"
_ITEMS = "_hvd_ckpt_items"
_AUTOCAST = "_hvd_ckpt_autocast"


@dataclass(frozen=True)
class Treatment:
    """What the forward pass of a block keeps.

    Attributes:
        title: for people: ``keep``, ``drop gelu, layer_norm``, ``recompute``.
        policy: which calls' results are dropped and how the others are kept, or None.
        recompute: keep the inputs alone and recompute all (for compiled blocks, whose inside cannot be seen).
    """

    title: str = "keep"
    policy: Policy | None = None
    recompute: bool = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` under this treatment."""
        if self.recompute:
            return run_checkpointed(function, args, kwargs, Options())
        if self.policy is not None:
            return run_selectively(function, args, kwargs, self.policy)
        return function(*args, **kwargs)


KEEP = Treatment()


def treat(module: nn.Module, treatment: Treatment) -> None:
    """Lets ``module.forward`` run under ``treatment`` from now on."""
    untreat(module)
    if treatment != KEEP:
        module.__dict__[_TREATMENT] = treatment
        module.__class__ = _treated(type(module), "__call__" if is_compiled(module) else "forward")  # type: ignore[arg-type]


def treat_chain(module: nn.Module, items: Sequence[Any]) -> None:
    """Lets an ``nn.Sequential`` run some of its children in segments.

    Args:
        items: (child names, treatment) for children in a row that are treated together, or a list of such items: a
            segment that is recomputed as a whole. Children that are in none are called as ever.
    """
    untreat(module)
    module.__dict__[_ITEMS] = {_first(item): item for item in items}
    module.__class__ = _chained(type(module))  # type: ignore[arg-type]


def untreat(module: nn.Module) -> None:
    """Makes the module what it was."""
    if _TREATMENT in module.__dict__ or _ITEMS in module.__dict__:
        module.__class__ = base_class(module)
        module.__dict__.pop(_TREATMENT, None)
        module.__dict__.pop(_ITEMS, None)
        module.__dict__.pop(_AUTOCAST, None)


def expect_autocast(module: nn.Module, dtype: str | None) -> None:
    """Lets a module that is treated warn when it trains under another autocast than to this dtype; None for no autocast."""
    if _TREATMENT in module.__dict__ or _ITEMS in module.__dict__:
        module.__dict__[_AUTOCAST] = dtype


def _check_autocast(module: nn.Module) -> None:
    if _AUTOCAST not in module.__dict__ or not torch.is_grad_enabled():
        return
    planned = module.__dict__[_AUTOCAST]
    kinds = (kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind))
    runs = next((str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds), None)
    if runs != planned:
        made, runs_so = (
            "without autocast" if one is None else f"under autocast to {one}" for one in (planned, runs)
        )
        warnings.warn(
            f"The plan was made {made}, and the model runs {runs_so}: its peak is another one, and may be over the budget. Make "
            f"the plan with hc.plan(..., autocast={'None' if runs is None else f'torch.{runs}'}).",
            stacklevel=3,
        )


def treated_parts(module: nn.Module) -> list[list[nn.Module]]:
    """What of a module is treated together: itself, or those children of a chain that run in spans or segments."""
    if _TREATMENT in module.__dict__:
        return [[module]]
    return [list(_children(module, item).values()) for item in module.__dict__.get(_ITEMS, {}).values()]


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author knows it."""
    kind = type(module)
    return getattr(kind, "_hvd_ckpt_base", kind)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or ``torch.compile`` made it."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


@functools.cache
def _treated(base: type[nn.Module], method: str) -> type[nn.Module]:
    original = getattr(base, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        treatment: Treatment = self.__dict__[_TREATMENT]
        _check_autocast(self)
        return treatment.run(functools.partial(original, self), args, kwargs)

    return _subclass(base, {method: functools.wraps(original)(run)})


@functools.cache
def _chained(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, input: Any) -> Any:
        items: dict[str, Any] = self.__dict__[_ITEMS]
        _check_autocast(self)
        names = list(self._modules)
        position = 0
        while position < len(names):
            item = items.get(names[position], ((names[position],), KEEP))
            input = _run_item(self, item, input)
            position += _length(item)
        return input

    return _subclass(base, {"forward": forward})


def _subclass(base: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        kind = type(self)
        maker, attributes = (
            (_chained, ()) if _ITEMS in self.__dict__ else (_treated, (next(iter(namespace)),))
        )
        assert kind is maker(base, *attributes)  # type: ignore[arg-type]
        getstate = getattr(base, "__getstate__", None)
        if getstate is None or getstate is getattr(object, "__getstate__", None):
            return _new, (maker, base, attributes), self.__dict__.copy()
        return _new, (maker, base, attributes), getstate(self)  # the class has a way of its own

    return type(
        base.__name__,
        (base,),
        {
            **namespace,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": reduce,
            "_hvd_ckpt_base": base,
        },
    )


def _new(
    maker: Callable[..., type[nn.Module]], base: type[nn.Module], attributes: tuple[str, ...]
) -> nn.Module:
    kind = maker(base, *attributes)
    module: nn.Module = kind.__new__(kind)
    return module


def _run_item(chain: nn.Module, item: Any, input: Any) -> Any:
    if isinstance(item, list):
        return run_checkpointed(
            functools.partial(_run_segment, _children(chain, item), item), (input,), {}, Options()
        )
    return _run_span(_children(chain, item), item, input)


def _run_segment(children: dict[str, nn.Module], items: list[Any], input: Any) -> Any:
    for item in items:
        if isinstance(item, list):
            inner = {name: children[name] for name in _names(item)}
            input = run_checkpointed(functools.partial(_run_segment, inner, item), (input,), {}, Options())
        else:
            input = _run_span(children, item, input)
    return input


def _run_span(children: dict[str, nn.Module], item: Any, input: Any) -> Any:
    names, treatment = item
    modules = [children[name] for name in names]
    return treatment.run(functools.partial(_call_all, modules), (input,), {})


def _call_all(modules: Sequence[nn.Module], input: Any) -> Any:
    for module in modules:
        input = module(input)
    return input


def _children(chain: nn.Module, item: Any) -> dict[str, nn.Module]:
    return {name: child for name in _names(item) if (child := chain._modules[name]) is not None}


def _names(item: Any) -> list[str]:
    if isinstance(item, list):
        return [name for inner in item for name in _names(inner)]
    return list(item[0])


def _first(item: Any) -> str:
    return _names(item)[0]


def _length(item: Any) -> int:
    return len(_names(item))
