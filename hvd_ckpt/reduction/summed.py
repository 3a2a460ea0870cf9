"""Gradients that are sums over the ranks already: added up again, they would count once per rank.

A gradient may be reduced a second time: by another optimizer of the same parameter, or because a backward pass has added to it
before it was cleared. The average of equal gradients is what they are; with ``op=Sum`` one rank brings the sum that there is,
and the others bring what has come since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from horovod.torch.mpi_ops import global_process_set

_ATTRIBUTE = "_summed_by_hvd_ckpt"


class _Sum(TypedDict):
    """Over which ranks a gradient is summed, and what it was before a backward pass added to it.

    Plain data, since it is copied and saved with the gradient.
    """

    process_set: int
    before: torch.Tensor | None


def mark_summed(gradient: torch.Tensor, process_set: Any) -> None:
    """Remembers that a gradient is the sum over the ranks of a process set; as long as it is this tensor."""
    setattr(gradient, _ATTRIBUTE, _Sum(process_set=process_set.process_set_id, before=None))


def copied(gradient: torch.Tensor, to: torch.Tensor) -> None:
    """A gradient lies in another tensor now, which may have been a sum before."""
    known = getattr(gradient, _ATTRIBUTE, None)
    if known is not None:
        setattr(to, _ATTRIBUTE, known)
    elif hasattr(to, _ATTRIBUTE):
        delattr(to, _ATTRIBUTE)


def forget_sums(groups: Sequence[Mapping[str, Any]]) -> None:
    """The gradients of an optimizer's parameter groups have been cleared."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                vars(parameter.grad).pop(_ATTRIBUTE, None)


def keep_sum(gradient: torch.Tensor) -> None:
    """A backward pass may be about to add to a gradient."""
    known: _Sum | None = getattr(gradient, _ATTRIBUTE, None)
    if known is not None and known["before"] is None:
        known["before"] = gradient.detach().clone()


def leave_own_part(gradient: torch.Tensor, process_set: Any, brings_sum: bool) -> None:
    """Makes a gradient, in place, what this rank is to bring to a sum over the ranks of a process set.

    Args:
        brings_sum: whether this is the rank that brings what is summed already.
    """
    known: _Sum | None = vars(gradient).pop(_ATTRIBUTE, None)
    sets = (process_set.process_set_id, global_process_set.process_set_id)
    if known is None or brings_sum or known["process_set"] not in sets:
        return
    with torch.no_grad():
        if known["before"] is None:
            gradient.zero_()
        else:
            gradient.sub_(known["before"])
