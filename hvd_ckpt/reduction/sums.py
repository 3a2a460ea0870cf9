"""Gradients that are already sums over the ranks, and must not be counted once per rank when they are reduced again.

A gradient may be reduced a second time: by another optimizer of the same parameter, or because a backward pass has added to it
before it was cleared. The average of equal gradients does not change them. With ``op=Sum`` one rank contributes the existing sum,
and the others contribute only what was added since. A gradient that was changed in place by hand since (its version shows this) is
this rank's own again.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from horovod.torch.mpi_ops import global_process_set

_ATTRIBUTE = "_summed_by_hvd_ckpt"


class _Sum(TypedDict):
    """Over which ranks a gradient is summed, what it was before a backward pass added to it, and its version.

    Plain data, since it is copied and saved with the gradient.
    """

    process_set: int
    before: torch.Tensor | None
    version: int


def mark_summed(parameter: torch.Tensor, process_set: Any) -> None:
    """Remembers that a gradient is the sum over the ranks of a process set, as long as it is this tensor and not changed."""
    gradient = parameter.grad
    if gradient is not None:
        # ``data`` has a version of its own. A view would share that of its bucket, so that a change of any gradient
        # in it would pass for a change of this one.
        parameter.grad = gradient = gradient.data
        known = _Sum(process_set=process_set.process_set_id, before=None, version=gradient._version)
        setattr(gradient, _ATTRIBUTE, known)


def sum_of(gradient: torch.Tensor) -> _Sum | None:
    """The record of a gradient that is a sum, or None."""
    known: _Sum | None = vars(gradient).get(_ATTRIBUTE)
    # Another version means a change by hand: the gradient is this rank's own again, which it brings whole.
    if known is not None and known["version"] != gradient._version:
        del vars(gradient)[_ATTRIBUTE]
        return None
    return known


def moved(gradient: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """A gradient whose values have been copied to a view into a bucket: the view, or an alias of it that is known to be a sum."""
    known = sum_of(gradient)
    if known is None:
        return to
    alias = to.data
    known = _Sum(process_set=known["process_set"], before=known["before"], version=alias._version)
    setattr(alias, _ATTRIBUTE, known)
    return alias


def keep_sum(gradient: torch.Tensor) -> None:
    """A backward pass may be about to add to a gradient."""
    known = sum_of(gradient)
    # Only before the first accumulation after a reduction. A later one finds the sum and a part of this rank
    # in one tensor, and must not take both for the sum.
    if known is not None and known["before"] is None:
        known["before"] = gradient.detach().clone()


def changed_sum(gradient: torch.Tensor) -> None:
    """A gradient was changed in place in an allowed way: by a backward pass, or by all ranks in the same way."""
    known: _Sum | None = vars(gradient).get(_ATTRIBUTE)
    if known is not None:
        known["version"] = gradient._version


def leave_own_part(gradient: torch.Tensor, process_set: Any, brings_sum: bool) -> None:
    """Makes a gradient, in place, what this rank is to bring to a sum over the ranks of a process set.

    Args:
        brings_sum: whether this is the rank that brings what is summed already.
    """
    known = sum_of(gradient)
    vars(gradient).pop(_ATTRIBUTE, None)
    # A sum over all ranks is equal on the ranks of any smaller set, so one of these must bring it alone, too.
    sets = (process_set.process_set_id, global_process_set.process_set_id)
    if known is None or brings_sum or known["process_set"] not in sets:
        return
    with torch.no_grad():
        if known["before"] is None:
            gradient.zero_()
        else:
            gradient.sub_(known["before"])
