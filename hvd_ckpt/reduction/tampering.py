"""Gradients that were changed by hand while they were in flight.

Between ``backward()`` and ``synchronize()`` a gradient may be on its way. One that was replaced by another tensor, or dropped, can
still be reduced again, if all ranks did the same; one that was changed in place cannot be told from what the allreduce wrote.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from hvd_ckpt.reduction.buckets import Bucket, Slot
from hvd_ckpt.reduction.placement import Placement


@dataclass(frozen=True)
class HiddenGradients:
    """Parameters whose ``grad`` is not the view into their bucket for a reason that the reducer knows.

    Attributes:
        late: a late part lies there.
        diverted: it was taken away, to make room for a late part.
        cleared: it had been dropped or replaced by hand when a further gradient came.
    """

    late: Set[int]
    diverted: Set[int]
    cleared: Set[int]


def find_changes(placement: Placement, hidden: HiddenGradients) -> tuple[list[int], str | None]:
    """The parameters whose gradient was replaced or dropped in flight, and an error if one was changed in place."""
    replaced: list[int] = []
    error = None
    for bucket in placement.buckets:
        if not bucket.launched or bucket.void:
            continue
        if bucket.flat is not None and bucket.flat._version != bucket.version:
            first, last = (placement.names[slot.index] for slot in (bucket.slots[0], bucket.slots[-1]))
            error = (
                f"a gradient was changed in place between backward() and synchronize(), while it was being reduced "
                f"(one of '{first}' to '{last}'); to clip, call hvd_ckpt.clip_grad_norm_ in place of torch's; for other changes "
                f"call optimizer.synchronize() first, then step() within optimizer.skip_synchronize()"
            )
        replaced.extend(slot.index for slot in bucket.slots if _is_replaced(slot, bucket, hidden))
    return replaced, error


def _is_replaced(slot: Slot, bucket: Bucket, hidden: HiddenGradients) -> bool:
    if slot.index in hidden.cleared:
        return True
    if slot.is_home() or slot.index in hidden.late:
        return False
    gradient = slot.parameter.grad
    if gradient is None:
        return slot.filled and slot.index not in hidden.diverted
    same_kind = slot.parameter.dtype is bucket.dtype  # else the model was converted, and its gradients moved
    return bool(slot.numel) and same_kind and not slot.holds(gradient)
