"""The exceptions of a step: control flags, late and unbucketed gradients, and the resynchronization of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_ckpt.reduction.agreement import ParameterFacts, check_parameters, check_present, raise_gathered
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.communicator import Communicator, empty_sparse_like


class ControlFlags(NamedTuple):
    """The control flags of a rank in each synchronization, and their sum over the ranks.

    Attributes:
        used: for each parameter, whether it has a gradient.
        late: for each parameter, whether a gradient came after its bucket had left.
        resynchronize: a rank asks for the resynchronization.
        notice: a rank has a notice for the caller.
        further: a rank has launched, or needs, more rounds than all make without being told (gradients in shards).
        unsteady: a rank had to launch in ``synchronize()`` (gradients in shards).
    """

    used: Sequence[float]
    late: Sequence[float]
    resynchronize: float
    notice: float
    further: float = 0.0
    unsteady: float = 0.0

    @staticmethod
    def size(parameters: int) -> int:
        """How many flags so many parameters have."""
        return 2 * parameters + len(ControlFlags._fields) - 2

    def tensor(self) -> torch.Tensor:
        """The flags, float32 [:meth:`size`]."""
        return torch.tensor([*self.used, *self.late, *self[2:]], dtype=torch.float32)

    @classmethod
    def of(cls, values: Sequence[float]) -> ControlFlags:
        """From the values of :meth:`tensor`."""
        count = (len(values) - cls.size(0)) // 2
        return cls(values[:count], values[count : 2 * count], *values[2 * count :])


# The resynchronization: what ranks tell each other when something has changed that buckets cannot express.
#
# A rank that has new parameters, whose model was converted to another dtype or device, or whose gradients were dropped in flight or
# changed by hand, asks for it through a control flag. All ranks then gather their reports and either continue in the same way or
# raise the same error.


@dataclass
class Report:
    """The report of one rank.

    Attributes:
        wanted: this rank asks for the resynchronization.
        error: must be raised on every rank.
        void: parameters whose bucket was sent empty, because the model was converted.
        dropped: parameters whose gradient was dropped by hand while it was in flight; where shards are added up, with what had left
            until then.
        sent: parameters whose gradient is in flight in a bucket.
        written: fingerprints of weights that the rank has written (stage 3).
        table: facts of all parameters.
        used: whether each parameter has a gradient.
    """

    wanted: bool = False
    error: Exception | None = None
    void: list[int] = field(default_factory=list)
    dropped: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    table: list[ParameterFacts] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)


def check_reports(reports: Sequence[Report]) -> None:
    """Raises, the same on every rank, if the ranks cannot continue together.

    Args:
        reports: reports of all ranks, in rank order.

    Raises:
        RecomputationMismatch: a rank has recomputed other values.
        RuntimeError: gradients were changed in place, or replaced in flight, or only on some ranks dropped or converted.
        ValueError: the ranks' parameters differ.
    """
    raise_gathered([report.error for report in reports])
    check_parameters([report.table for report in reports])
    names = [facts.name for facts in reports[0].table]
    for rank, report in enumerate(reports):
        for index in sorted(set(report.void) ^ set(reports[0].void)):
            here, there = (rank, 0) if index in report.void else (0, rank)
            raise _different(names[index], "was converted to another dtype or device", here, there)
    # A rank that has sent nothing of a gradient has nothing to drop.
    for there, report in enumerate(reports):
        for here, other in enumerate(reports):
            for index in sorted(set(report.sent).intersection(other.dropped)):
                what = "had its gradient dropped between backward() and synchronize()"
                raise _different(names[index], what, here, there)


def _different(name: str, what: str, here: int, there: int) -> RuntimeError:
    return RuntimeError(
        f"parameter '{name}' {what} on rank {here} but not on rank {there}; do the same on every rank, between the same passes"
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
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = reduced
            elif gradient.layout is not torch.strided:
                parameter.grad = gradient + reduced.to_sparse(gradient.sparse_dim())
            else:
                with torch.no_grad():
                    gradient.add_(reduced)

    def reduce_apart(self, indices: Sequence[int], used: Set[int]) -> None:
        """Reduces gradients that the buckets of this step did not have: each ``grad`` is what a rank has.

        Args:
            used: those that some rank has.
        """
        for index in indices:
            if index in used:
                self.reduce(index)
            else:
                self.assignment.parameters[index].grad = None

    def reduce_sparse(self, indices: Sequence[int]) -> None:
        """Gathers sparse gradients; a missing one counts as empty.

        Raises:
            ValueError: a rank has called ``join()``; on every rank.
        """
        if indices:
            # Sparse gradients are gathered. Of a step, only they and a resynchronization
            # cannot do without a rank that has joined.
            check_present(
                round(self.communicator.sum(torch.ones(1, dtype=torch.float32), "present")[0]),
                self.communicator.process_set,
                f"the sparse gradient of parameter '{self.assignment.names[min(indices)]}'",
                "pass sparse_as_dense=True, or give every rank as many batches",
            )
        for index in sorted(indices):
            parameter = self.assignment.parameters[index]
            sparse_dim = self.assignment.sparse[index]
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
