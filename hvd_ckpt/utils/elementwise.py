"""Optimizers that update each element by itself. Only these can update shards, whose edges may be anywhere in a parameter."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from hvd_ckpt.utils.text import STAGES

_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# State of torch.optim's classes that is not of a parameter's elements.
COUNTERS = ("step", "eta", "mu", "mu_product")
_OTHERS = {
    "LBFGS": "takes inner products over all parameters",
    "Adafactor": "keeps sums of a matrix's rows and columns",
    "Muon": "makes each whole matrix orthogonal",
    "SparseAdam": "takes sparse gradients only, and shards are dense",
}


def check_elementwise(optimizer: torch.optim.Optimizer, promised: bool = False) -> None:
    """Checks that an optimizer can step parts of parameters.

    Args:
        promised: the user says that it does (``hc.Shard(..., elementwise=True)``).

    Raises:
        ValueError: it is known not to; or it is not known to, and is not promised to.
    """
    kind = class_of(optimizer)
    if kind in {getattr(torch.optim, name) for name in _ELEMENTWISE}:
        return
    for name, reason in _OTHERS.items():
        known = getattr(torch.optim, name, None)
        if known is not None and issubclass(kind, known):
            raise ValueError(
                f"optimizer {kind.__name__} does not work on each element by itself ({name} {reason}), so its state cannot be "
                f"split over the ranks: it supports shard='{STAGES[0]}' (0) only; for the other stages take an element-wise one "
                f"such as torch.optim.AdamW"
            )
    if not promised:
        raise ValueError(
            f"optimizer {kind.__name__} may not work on each element by itself, which shards need ({', '.join(_ELEMENTWISE)} of "
            f"torch.optim do): pass shard=hc.Shard(..., elementwise=True) if it updates each element from that element's "
            f"value, gradient and state alone, else shard='{STAGES[0]}'"
        )


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that steps: of a distributed optimizer the wrapped one."""
    kind: type[Any] = getattr(optimizer, "wrapped_class", type(optimizer))
    return kind


def twin_of(optimizer: torch.optim.Optimizer) -> Any:
    """A copy with the methods and settings of an optimizer, without its state and hooks, to be given groups and tried out."""
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A class of one's own may change containers.
        twin.__dict__[name] = copy.copy(value) if type(value) in (list, dict, set) else value
    twin.__dict__.update({name: OrderedDict() for name in HOOKS})
    twin.state = defaultdict(dict)
    return twin


def optimizer_classes() -> dict[str, Any]:
    """The classes of torch.optim by lower-case name. Typed as Any: each has its own arguments."""
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
