"""The phases of an optimizer's step, and the errors of calls that do not fit the phase."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch


class Phase(enum.Enum):
    """The state of the gradients in a step."""

    ACCUMULATING = "not reduced"
    LOADED = "not reduced; a state was loaded, and zero_grad() may drop what has been accumulated"
    REDUCED = "reduced for a caller that changes them before a step, such as clip_grad_norm_"
    SYNCHRONIZED = "reduced by the user's synchronize()"
    STEPPED = "used by a step, or skipped"

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients are reduced and not used yet."""
        return self in (Phase.REDUCED, Phase.SYNCHRONIZED)


class StepReduces(enum.Enum):
    """Whether ``step()`` reduces the gradients."""

    YES = "the usual case"
    NOT_IN_SKIP = "within skip_synchronize()"
    NOT_FOR_SCALER = "within without_reduction(), of this library's GradScaler for instance"


# The first two are Horovod's.
REDUCED_BEFORE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)
CLEARED_UNREDUCED = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. Every rank must call step(), not rank 0 alone; "
    "to drop what the loss of another optimizer has added, call model.zero_grad()."
)
UNREDUCED = (
    "optimizer.step() would use gradients that are not reduced: backward() has added to them since the last "
    "synchronize(), unscale_() or clip_grad_norm_(); call optimizer.synchronize() before step() within "
    "skip_synchronize(), and no backward() between unscale_() and scaler.step()"
)
NOT_CLEARED = (
    "optimizer.step() would miss gradients that an earlier step has used and nobody has cleared: they were split over the ranks "
    "(stages 2 and 3), and nothing of them is left to add to or to use again; call optimizer.zero_grad() after each step"
)
SCALED_UNREDUCED = (
    "torch.amp.GradScaler.step(optimizer) was called before optimizer.synchronize(): each rank would skip or take "
    "the step by its own gradients; use hvd_ckpt.GradScaler, or call optimizer.synchronize() and "
    "scaler.unscale_(optimizer) first, then scaler.step(optimizer) within optimizer.skip_synchronize()"
)


def put_in(
    groups: Sequence[Sequence[torch.Tensor]], known: Callable[[torch.Tensor], bool]
) -> RuntimeError | None:
    """The error for the first parameter that somebody has put into a group, where an optimizer does not know it."""
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group):
            if not known(parameter):
                return RuntimeError(
                    f"param_groups[{number}]['params'][{place}] (shape {tuple(parameter.shape)}) was put there after "
                    "DistributedOptimizer() was called, so this optimizer does not train it; make the DistributedOptimizer again "
                    "after parameters are replaced, or add new ones by add_param_group()"
                )
    return None
