"""Flags of ranks in each synchronization of sharded gradients: one message, of which all ranks get the greatest values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

USED, LATE = 1.0, 2.0


class ShardFlags(NamedTuple):
    """The flags of a rank in each synchronization, and the greatest of each over the ranks.

    Attributes:
        states: for each parameter, 0, USED or LATE.
        dropped: for each parameter, 1 where its gradient was set to None after it had left, and none has come since.
        needs: for each group, how many launches it needs.
        last_arrivals: for each group, where it was completed on rank 0.
        notice: a rank has a notice for the caller.
        converted: 1 + the number of a parameter that was converted, or 0.
        position: in the schedule.
        unsteady: a rank had to launch in ``synchronize``.
        failed: a rank has recomputed other values.
        anew, not_anew: digest of the gradients that were dropped after they had left; one is the other times -1.
        written, unwritten: digest of the values that the rank has written to weights; one is the other times -1.
    """

    states: Sequence[float]
    dropped: Sequence[float]
    needs: Sequence[float]
    last_arrivals: Sequence[float]
    notice: float
    converted: float
    position: float
    unsteady: float
    failed: float
    anew: float
    not_anew: float
    written: float
    unwritten: float

    def tensor(self) -> torch.Tensor:
        """The flags, float32 [2 * parameters + 2 * groups + 9]."""
        # In the order of the fields; of() cuts the vectors out by the numbers of parameters and groups, which all ranks know.
        values = [*self.states, *self.dropped, *self.needs, *self.last_arrivals, *self[4:]]
        return torch.tensor(values, dtype=torch.float32)

    @classmethod
    def of(cls, values: Sequence[float], parameters: int, groups: int) -> ShardFlags:
        """From the values of :meth:`tensor`."""
        ends = [parameters, 2 * parameters, 2 * parameters + groups, 2 * (parameters + groups)]
        vectors = [values[start:end] for start, end in zip([0, *ends], ends)]
        return cls(*vectors, *values[ends[-1] :])  # type: ignore[arg-type]
