"""Verification of copies: after each step the parts compare some of their copies of norms, biases and positions.

Copies stay equal without a reduction, since all parts compute the same gradients for them. Clipping by the norm of one part's
gradients, for example, would make them differ, and nothing else would report it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_ckpt.parallel.tensor.verification import forget
from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.consistency import WeightsDiffer
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.weights import verifies_weights
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.fingerprint import fingerprint
from hvd_ckpt.utils.unmaterialized import is_absent

AT_ONCE = 8  # copies compared in a step: one small message

_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each optimizer


@functools.cache
def watch_copies() -> None:
    """Compares copies after each step of a ``DistributedOptimizer`` from now on."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, ReducedOptimizer) or current().tensor == 1:
        return
    # A copy of an optimizer, with which a step is tried out, knows no names.
    names = getattr(optimizer, "parameter_names", {})
    forget(names)
    if names and verifies_weights():
        _steps[optimizer] = _steps.get(optimizer, 0) + 1
        check_copies([(name, parameter) for parameter, name in names.items()], _steps[optimizer])


@torch.no_grad()
def check_copies(named: Iterable[tuple[str, Tensor]], turn: int | None = None) -> None:
    """Raises on all parts if a parameter that is whole on each part differs between them. Collective over the parts.

    Args:
        named: parameters with their names, in the same order on all parts.
        turn: number of the comparison, which selects some of the parameters; None for all of them.

    Raises:
        WeightsDiffer: it names the parts, and the first parameter that differs.
    """
    # Of parameters that a stage has not, or that are split over the ranks between steps, there are no values.
    copies = [
        (name, tensor)
        for name, tensor in named
        if cut_of(tensor) is None and not (tensor.is_meta or is_absent(tensor))
    ]
    if turn is not None and copies:
        turns = -(-len(copies) // AT_ONCE)
        copies = copies[turn % turns * AT_ONCE :][:AT_ONCE]
    if not copies:
        return
    prints = torch.cat([fingerprint(tensor.contiguous().view(-1)).cpu().view(1) for _, tensor in copies])
    for part, row in enumerate(rows := parts.gather(prints)):
        # All parts have all rows, so that all of them find the same difference and raise together.
        if len(different := (row != rows[0]).nonzero()):
            raise WeightsDiffer(
                f"parameter '{copies[int(different[0])][0]}', which each part has whole, differs between parts 0 and {part} of "
                f"replica {current().replica}; clip gradients with hc.clip_grad_norm_, give all parts of a replica the same batch "
                f"and random state, and name a module that uses it with a part's features as 'features' in the recipe"
            )
