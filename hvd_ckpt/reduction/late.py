"""The exceptions of a step: late and unbucketed gradients, gradients modified in flight, and the resynchronization of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_ckpt.reduction.agreement import ParameterFacts, check_parameters
from hvd_ckpt.reduction.buckets import BucketAssignment
from hvd_ckpt.reduction.communicator import Communicator, empty_sparse_like


class ControlFlags(NamedTuple):
    """What a rank tells the others in each synchronization, and their sum over the ranks.

    Attributes:
        used: of each parameter, whether it has a gradient.
        late: of each parameter, whether a gradient came after its bucket had left.
        resynchronize: a rank asks for the resynchronization.
        notice: a rank has a notice for the caller.
    """

    used: Sequence[float]
    late: Sequence[float]
    resynchronize: float
    notice: float

    def tensor(self) -> torch.Tensor:
        """The flags, float32 [2 * parameters + 2]."""
        return torch.tensor([*self.used, *self.late, self.resynchronize, self.notice], dtype=torch.float32)

    @classmethod
    def of(cls, values: Sequence[float]) -> ControlFlags:
        """From the values of :meth:`tensor`."""
        count = len(values) // 2 - 1
        return cls(values[:count], values[count : 2 * count], *values[2 * count :])


# The resynchronization: what ranks tell each other when something has changed that buckets cannot express.
#
# A rank that has new parameters, whose model was converted to another dtype or device, or whose gradients were replaced by hand
# while in flight, asks for it through a control flag. All ranks then gather their reports and either continue in the same way or
# raise the same error.


@dataclass
class Report:
    """The report of one rank.

    Attributes:
        wanted: this rank asks for the resynchronization.
        error: a sentence that must be raised on every rank.
        void: names of parameters whose bucket was sent empty, because the model was converted.
        replaced: names of parameters whose gradient was replaced by hand while its bucket was in flight.
        table: facts of all parameters.
        used: whether each parameter has a gradient.
    """

    wanted: bool = False
    error: str | None = None
    void: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    table: list[ParameterFacts] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)


def check_reports(reports: Sequence[Report]) -> None:
    """Raises, the same on every rank, if the ranks cannot continue together.

    Args:
        reports: of all ranks, in rank order.

    Raises:
        RuntimeError: gradients in flight were changed, or only on some ranks replaced or converted.
        ValueError: the ranks' parameters differ.
    """
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise RuntimeError(f"rank {rank}: {report.error}")
    check_parameters([report.table for report in reports])
    _check_equal([report.void for report in reports], "was converted to another dtype or device")
    replaced = "had its gradient replaced between backward() and synchronize()"
    _check_equal([report.replaced for report in reports], replaced)


def _check_equal(names: Sequence[Sequence[str]], what: str) -> None:
    for rank, own in enumerate(names):
        different = sorted(set(own) ^ set(names[0]))
        if different:
            here, there = (rank, 0) if different[0] in own else (0, rank)
            raise RuntimeError(
                f"parameter '{different[0]}' {what} on rank {here} but not on rank {there}; do the same on every rank"
            )


@dataclass(frozen=True)
class UnbucketedGradients:
    """Reduces gradients one by one. Every rank calls the same methods with the same indices.

    Attributes:
        assignment: the parameters.
        communicator: how tensors reach the other ranks.
        done: takes the name of each parameter that is reduced.
    """

    assignment: BucketAssignment
    communicator: Communicator
    done: list[str]

    def reduce(self, index: int) -> None:
        """Reduces one dense gradient; a missing one counts as zero."""
        parameter = self.assignment.parameters[index]
        self.communicator.leave_own_part(parameter)
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        reduced = self._reduced(index, gradient)
        dims = self.assignment.densified.get(index)
        parameter.grad = reduced if dims is None else reduced.to_sparse(dims)

    def add_late_parts(self, late: Sequence[int], parts: Mapping[int, torch.Tensor]) -> None:
        """Reduces what came after a bucket had left, and adds it: averaging is linear."""
        for index in late:
            parameter = self.assignment.parameters[index]
            part = parts.get(index)
            reduced = self._reduced(index, torch.zeros_like(parameter) if part is None else part)
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                with torch.no_grad():
                    parameter.grad.add_(reduced)

    def reduce_sparse(self, indices: Sequence[int]) -> None:
        """Gathers sparse gradients; a missing one counts as empty."""
        for index in sorted(indices):
            parameter = self.assignment.parameters[index]
            sparse_dim = self.assignment.sparse[index]
            self.communicator.leave_own_part(parameter)
            gradient = parameter.grad
            if gradient is None:
                gradient = empty_sparse_like(parameter, sparse_dim)
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(sparse_dim)
            parameter.grad = self.communicator.reduce_sparse(index, gradient)
            self.done.append(self.assignment.names[index])

    def _reduced(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        self.done.append(self.assignment.names[index])
        return self.communicator.reduce_single(index, gradient)


# Gradients that were changed by hand while they were in flight.
#
# One that was replaced by another tensor, or dropped, can still be reduced again, if all ranks did the same; one that was
# changed in place cannot be distinguished from what the allreduce wrote.


def find_changes(
    assignment: BucketAssignment, late: Set[int], diverted: Set[int], cleared: Set[int]
) -> tuple[list[int], str | None]:
    """The parameters whose gradient was replaced or dropped in flight, and an error if one was changed in place.

    Args:
        late: parameters whose ``grad`` is a late part.
        diverted: parameters whose ``grad`` was taken away, to make room for a late part.
        cleared: parameters whose ``grad`` had been dropped or replaced by hand when a further gradient came.
    """
    replaced: list[int] = []
    error = None
    for bucket in assignment.buckets:
        if not bucket.launched or bucket.void:
            continue
        if bucket.flat is not None and bucket.flat._version != bucket.version:
            first, last = (assignment.names[entry.index] for entry in (bucket.entries[0], bucket.entries[-1]))
            error = (
                f"a gradient was changed in place between backward() and synchronize(), while it was being reduced "
                f"(one of '{first}' to '{last}'); to clip, call hvd_ckpt.clip_grad_norm_ in place of torch's; for other changes "
                f"call optimizer.synchronize() first, then step() within optimizer.skip_synchronize()"
            )
        for entry in bucket.entries:
            index, gradient = entry.index, entry.parameter.grad
            if entry.is_home() or index in late:
                changed = index in cleared
            elif gradient is None:
                changed = index in cleared or (entry.filled and index not in diverted)
            else:
                # Else the model was converted, and its gradients moved.
                same_kind = entry.parameter.dtype is bucket.dtype
                changed = index in cleared or bool(entry.numel and same_kind and not entry.holds(gradient))
            if changed:
                replaced.append(index)
    return replaced, error
