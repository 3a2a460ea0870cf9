"""Clipping of gradients by their norm over all pipeline stages, as ``torch.nn.utils.clip_grad_norm_`` does for a whole model.

The stages exchange the norm of each parameter once, so the total has the bits of the unstaged model. With sharded gradients (stages
2 and 3), they exchange one norm for each stage, and the total is equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from hvd_ckpt.processes import whole_model
from hvd_ckpt.processes.grid import Grid
from hvd_ckpt.sharding.clipping import SplitGradients, norm_dtype, owners_of, split_gradients

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)


def clip_over_stages(
    parameters: Iterable[nn.Parameter],
    places: Mapping[nn.Parameter, int],
    count: int,
    grid: Grid,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clips the gradients of this rank's parameters by the norm over all stages. Collective over all ranks.

    Args:
        parameters: parameters of this rank.
        places: for each parameter, its place among the parameters of the whole model.
        count: number of parameters of the whole model.
        grid: connects the stages.
        max_norm, norm_type, error_if_nonfinite: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        RuntimeError: the norm is inf or nan and ``error_if_nonfinite`` is set; raised on every rank.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    owners = owners_of(parameters)
    for owner in owners:
        # Among the replicas of this stage, in their own Horovod world.
        # Messages between stages come after it, in the same order everywhere.
        owner.reduce_for_caller()
    if (split := split_gradients(owners, parameters)) is not None:
        return _clip_sharded(split, grid, max_norm, norm_type, error_if_nonfinite)
    measured = torch.full((count,), -1.0, dtype=torch.float64)
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    norms_here = [torch.linalg.vector_norm(gradient, norm_type).double() for gradient in gradients.values()]
    if norms_here:
        whole = whole_model.norms(torch.stack(norms_here), list(gradients), norm_type)
        measured[[places[parameter] for parameter in gradients]] = whole.cpu()
    norms, dtype = _gathered(grid, measured, {gradient.dtype for gradient in gradients.values()})
    # A stage without a parameter has -1 in its place. Copies of a tied parameter have equal norms, one of which counts.
    chosen = norms.max(dim=0).values
    # The norms are in the order of the whole model's parameters. So they
    # are added as torch adds them without stages, with the same bits.
    total = _joined(chosen.to(dtype), norm_type)
    _check_finite(total, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    for owner in owners:
        # Else the optimizer would take the clipped gradients for new ones and reduce them again.
        owner.note_changes()
    return total


def _clip_sharded(
    split: SplitGradients, grid: Grid, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    norm = split.norm(float(norm_type))
    measured = torch.tensor([-1.0 if norm is None else norm], dtype=torch.float64)
    norms, dtype = _gathered(grid, measured, split.dtypes)
    exact = norms[norms > 0].sum() if norm_type == 0 else _joined(norms.flatten(), norm_type)
    total = exact.to(dtype)
    _check_finite(total, norm_type, error_if_nonfinite)
    split.clip(float(max_norm), float(exact))
    return total


def _gathered(grid: Grid, measured: Tensor, dtypes: Collection[torch.dtype]) -> tuple[Tensor, torch.dtype]:
    """The measurements of each stage, one row for each, and the dtype of the total norm. Collective."""
    there = torch.tensor([dtype in dtypes for dtype in _DTYPES], dtype=torch.float64)
    rows = torch.stack(grid.gather(torch.cat([measured, there]), parts=False))
    norms, marks = rows[:, : len(measured)], rows[:, len(measured) :]
    return norms, norm_dtype(dtype for dtype, mark in zip(_DTYPES, marks.any(dim=0)) if mark)


def _joined(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of several norms. A negative one stands for a missing gradient."""
    there = norms[~(norms < 0)]  # includes nan
    total: Tensor = torch.linalg.vector_norm(there, norm_type) if there.numel() else norms.new_zeros(())
    return total


def _check_finite(total: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {total.item()}, so they cannot be clipped"
        )
