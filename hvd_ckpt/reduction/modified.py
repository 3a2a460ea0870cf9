"""Gradients that come, or are changed by hand, while their bucket is in flight.

A gradient that comes after its bucket has left is a *late part*: it goes to a new tensor and is reduced separately. A gradient
that was replaced or dropped can still be reduced again, unless a rank has sent its gradient and no longer has it. A gradient that
was changed in place cannot be distinguished from the result of the allreduce.
"""

from __future__ import annotations

import torch

from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import Bucket, GradientEntry

# What a gradient finds in ``grad`` that is accumulated after its bucket has left:
#
#   ``grad`` is                        before the accumulation          after it
#   the view, which is in flight       hidden (diverted): None          autograd's new tensor is the late part
#   None: the bucket has left empty    nothing to hide                  the same
#   a late part                        its version is compared          the late part has grown
#   another tensor, or dropped         noted as replaced                nothing; the ranks reduce it again


class ModifiedGradients:
    """The modifications of one step, by the parameters' indices.

    Attributes:
        late: the late parts, with their versions: another one tells of a change in place.
        diverted: the gradient in flight has made room for a late part.
        error: that a gradient was changed in place.
    """

    def __init__(self) -> None:
        self.late: dict[int, tuple[torch.Tensor, int]] = {}
        self.diverted: set[int] = set()
        self.error: RuntimeError | None = None
        self._replaced: set[int] = set()  # had been replaced or dropped when a further gradient came
        self._adopted: set[int] = set()  # the bucket has taken the first part, and more was to come

    def clear(self) -> None:
        """Forgets everything; the next step begins."""
        for modified in (self.late, self.diverted, self._replaced, self._adopted):
            modified.clear()
        self.error = None

    def before_late(self, bucket: Bucket, entry: GradientEntry, name: str) -> None:
        """A gradient is about to be accumulated, and its bucket has left: keeps it out of the memory in flight."""
        index, parameter = entry.index, entry.parameter
        if bucket.void or index in self._replaced:
            return
        late = self.late.get(index)
        if self._was_replaced(bucket, entry):
            self._replaced.add(index)
            self.late.pop(index, None)
        elif late is not None:
            if late[0]._version != late[1]:
                self.error = changed_in_place(name)
        elif parameter.grad is not None and entry.filled:
            self.diverted.add(index)
            parameter.grad = None

    def after_late(self, bucket: Bucket, entry: GradientEntry) -> None:
        """It has been accumulated."""
        gradient = entry.parameter.grad
        if gradient is not None and not bucket.void and entry.index not in self._replaced:
            self.late[entry.index] = gradient, gradient._version

    def adopt(self, bucket: Bucket, entry: GradientEntry) -> None:
        """The first of several parts has been accumulated: brings it into the bucket, where the others are added."""
        if bucket.adopt(entry):
            self._adopted.add(entry.index)

    def has_lost_parts(self, entry: GradientEntry) -> bool:
        """Whether the earlier parts of a gradient, whose bucket has not left, were dropped or replaced by hand."""
        gradient = entry.parameter.grad
        if entry.index not in self._adopted or gradient is entry.view:
            return False
        return gradient is None or not entry.holds(gradient)

    def find_replaced(self, assignment: BucketAssignment) -> list[int]:
        """The parameters whose gradient was replaced or dropped in flight.

        What was set by hand, where the bucket has left without a gradient, becomes a late part.
        """
        replaced: list[int] = []
        for bucket in assignment.buckets:
            if not bucket.launched or bucket.void:
                continue
            changed = bucket.flat is not None and bucket.flat._version != bucket.version
            if changed and bucket.fits_parameters():  # a conversion changes versions, too
                self.error = changed_in_place(*(assignment.names[bucket.indices[place]] for place in (0, -1)))
            for entry in bucket.entries:
                index, late = entry.index, self.late.get(entry.index)
                if entry.is_home() and index not in self._replaced:
                    continue
                bucket.all_home = False
                if index in self._replaced or self._was_replaced(bucket, entry):
                    replaced.append(index)
                elif late is None:
                    # Where a gradient has left, all is well: it was hidden and no late part came (the hook
                    # also runs for ``torch.autograd.grad``), or another tensor object has the view's memory.
                    self.after_late(bucket, entry) if not entry.filled else None
                elif late[0]._version != late[1]:
                    self.error = changed_in_place(assignment.names[index])
        for index in replaced:
            self.late.pop(index, None)
            self.diverted.discard(index)
        return replaced

    def _was_replaced(self, bucket: Bucket, entry: GradientEntry) -> bool:
        """Whether a gradient was replaced or dropped by hand since it has left with its bucket."""
        gradient, late = entry.parameter.grad, self.late.get(entry.index)
        if late is not None:
            return gradient is not late[0]
        # Hidden for a late part that has not come yet, so what is there was set by hand.
        if entry.index in self.diverted:
            return gradient is not None
        if not entry.filled:
            return False
        if gradient is None:
            return True
        # Where the model was converted, its gradients have moved.
        same_kind = entry.parameter.dtype is bucket.dtype and entry.parameter.device == bucket.device
        return entry.numel > 0 and same_kind and not entry.holds(gradient)


def changed_in_place(first: str, last: str | None = None) -> RuntimeError:
    """The error for a gradient that was changed in place in flight."""
    which = f"that of '{first}'" if last in (None, first) else f"one of '{first}' to '{last}'"
    return RuntimeError(
        f"a gradient was changed in place between backward() and synchronize(), while it was being reduced ({which}); to clip, "
        f"call hvd_ckpt.clip_grad_norm_ in place of torch's; to drop gradients, set them to None; for other changes call "
        f"optimizer.synchronize() first, then step() within optimizer.skip_synchronize()"
    )
