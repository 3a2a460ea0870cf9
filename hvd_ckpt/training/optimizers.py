"""Optimizers of torch.optim by name, with weight decay where it belongs.

Weight decay pulls matrices towards zero and leaves biases and the scales of norms alone, as BERT (Devlin et al., 2018) and
GPT (Radford et al., 2018; Brown et al., 2020) were trained: a vector's length is not what makes a network overfit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hvd_ckpt.names import unknown

__all__ = ["build", "names"]

LEFT_OUT = {
    "lbfgs": "it evaluates the loss several times in each step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, so biases and norms would need another optimizer",
}
_NOT_OPTIONS = ("self", "params", "lr", "weight_decay", "differentiable")


def names() -> tuple[str, ...]:
    """The names that :func:`build` takes, sorted."""
    return tuple(sorted(name for name in _classes() if name not in LEFT_OUT))


def build(
    name: str,
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer for the model's trained parameters.

    It has two groups, each in the order of ``model.named_parameters()``: tensors of two or more dimensions, which decay, and
    the others, which do not. There are two whatever the weight decay, so a state can be loaded after it was changed;
    one if all parameters are of a kind, or the optimizer knows no weight decay. A tied parameter is there once, a frozen one not
    at all.

    Args:
        name: a class of torch.optim in lower case, such as ``adamw``.
        model: whose parameters are optimized.
        lr: the learning rate, above 0.
        weight_decay: of the first group; it replaces the class's own default.
        options: other keyword arguments of the class; lists stand for tuples.

    Raises:
        ValueError: no such optimizer or option (the message names the nearest), a bad value, weight decay that the
            optimizer has no use for, or a model with nothing to train.
    """
    found = _find(name)
    knobs = inspect.signature(found).parameters
    _check_number(name, "lr", lr, above_zero=True)
    _check_number(name, "weight_decay", weight_decay, above_zero=False)
    decays = "weight_decay" in knobs
    if weight_decay and not decays:
        raise ValueError(
            f"optimizer '{name}' has no weight decay: leave weight_decay at 0, not {weight_decay}"
        )
    checked = {key: _option(name, key, value, knobs) for key, value in (options or {}).items()}
    try:
        optimizer: torch.optim.Optimizer = found(_groups(model, weight_decay, decays), lr=lr, **checked)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"optimizer '{name}': {' '.join(str(error).split())}") from None
    return optimizer


def _classes() -> dict[str, Any]:
    """Optimizer classes by lower-case name. Typed as Any: each has arguments of its own."""
    return {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }


def _find(name: str) -> Any:
    key = name.strip().lower()
    if key in LEFT_OUT:
        raise ValueError(
            f"optimizer '{name}' cannot be used here: {LEFT_OUT[key]}; take one of {', '.join(names())}"
        )
    if key not in names():
        raise ValueError(unknown("optimizer", name, names()))
    return _classes()[key]


def _groups(model: nn.Module, weight_decay: float, decays: bool) -> list[dict[str, Any]]:
    trained = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that is trained: unfreeze some")
    if not decays:
        return [{"params": trained}]
    split = (
        ([parameter for parameter in trained if parameter.ndim >= 2], weight_decay),
        ([parameter for parameter in trained if parameter.ndim < 2], 0.0),
    )
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in split if parameters]


def _check_number(optimizer: str, what: str, value: float, above_zero: bool) -> None:
    right = _is_number(value) and math.isfinite(value) and (value > 0 if above_zero else value >= 0)
    if not right:
        least = "above 0" if above_zero else "from 0"
        raise ValueError(f"optimizer '{optimizer}': {what} is {value!r}: give a number {least}")


def _option(optimizer: str, key: str, value: Any, knobs: Mapping[str, inspect.Parameter]) -> Any:
    """The value as the class takes it: torch checks ranges, but not types, and files know no tuples."""
    if key in ("lr", "weight_decay"):
        raise ValueError(f"optimizer '{optimizer}': {key} is no option: it has an argument of its own")
    known = [knob for knob in knobs if knob not in _NOT_OPTIONS]
    if key not in known:
        raise ValueError(unknown(f"{optimizer} option", key, known))
    usual = knobs[key].default
    if isinstance(usual, tuple):
        right = (
            isinstance(value, (list, tuple))
            and len(value) == len(usual)
            and all(_is_number(one) or (one is None and own is None) for one, own in zip(value, usual))
        )
        wanted = f"{len(usual)} numbers"
    elif usual is None or isinstance(usual, bool):
        right = isinstance(value, bool) or (value is None and usual is None)
        wanted = "true or false"
    else:
        right, wanted = _is_number(value), "a number"
    if not right:
        raise ValueError(
            f"optimizer '{optimizer}': {key} is {value!r}: give {wanted}, as in its default {usual}"
        )
    return tuple(value) if isinstance(usual, tuple) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
