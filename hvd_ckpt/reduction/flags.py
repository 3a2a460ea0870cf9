"""What ranks tell each other in a step: control flags, and reports where these do not say enough (the resynchronization)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_ckpt.collectives.agreement import ParameterFacts, check_parameters, raise_gathered


class ControlFlags(NamedTuple):
    """The control flags of a rank in each synchronization, and their sum over the ranks.

    Attributes:
        used: for each parameter, whether it has a gradient.
        late: for each parameter, whether a gradient came after its bucket had left (whole gradients).
        resynchronize: a rank asks for the resynchronization.
        notice: a rank has a notice for the caller.
        further: a rank has launched, or needs, more rounds than all make without being told (gradients in shards).
        unsteady: a rank had to launch in ``synchronize()`` (gradients in shards).
        uncleared: a rank has gradients that an earlier step has used and nobody has cleared (gradients in shards).
    """

    used: Sequence[float]
    late: Sequence[float]
    resynchronize: float
    notice: float
    further: float = 0.0
    unsteady: float = 0.0
    uncleared: float = 0.0

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
        dropped: parameters whose gradient was dropped by hand after it had left, or left as zeros, since the model was converted.
        sent: parameters whose gradient is in flight.
        written: fingerprints of weights that the rank has written (stage 3).
        table: facts of all parameters.
        used: whether each parameter has a gradient.
    """

    wanted: bool = False
    error: Exception | None = None
    dropped: set[int] = field(default_factory=set)
    sent: list[int] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    table: list[ParameterFacts] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)


def check_reports(reports: Sequence[Report], names: Sequence[str]) -> None:
    """Raises, the same on every rank, if the ranks cannot continue together.

    Raises:
        RecomputationMismatch: a rank has recomputed other values.
        RuntimeError: gradients were changed in place, or replaced in flight, or only on some ranks dropped or converted.
        ValueError: the ranks' parameters differ.
    """
    raise_gathered([report.error for report in reports])
    check_parameters([report.table for report in reports])
    # A rank that has sent nothing of a gradient has nothing to drop. What ranks have sent until each has dropped it does not count,
    # and what has come since has not left, so the ranks may drop it between different passes.
    for there, report in enumerate(reports):
        for here, other in enumerate(reports):
            for index in sorted(other.dropped.intersection(report.sent)):
                raise RuntimeError(
                    f"parameter '{names[index]}' had its gradient dropped or was converted between backward() and synchronize() "
                    f"on rank {here} but not on rank {there}; do the same on every rank; to drop gradients, whichever buckets have "
                    "left on each of them, call optimizer.synchronize() and then optimizer.zero_grad()"
                )
