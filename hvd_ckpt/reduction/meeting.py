"""The meeting: what ranks tell each other when something has changed that buckets cannot express.

A rank that has new parameters, whose model was converted to another dtype or device, or whose gradients were replaced by hand
while in flight, asks for a meeting through a control word. All ranks then gather their reports and either go on in the same
way or raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_ckpt.reduction.agreement import ParameterFacts, check_parameters


@dataclass
class Report:
    """What one rank has to say.

    Attributes:
        wanted: this rank asks for the meeting.
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


class Meeting:
    """The reports of all ranks, in rank order."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = reports

    def check(self) -> None:
        """Raises, the same on every rank, if the ranks cannot go on together.

        Raises:
            RuntimeError: gradients in flight were changed, or only on some ranks replaced or converted.
            ValueError: the ranks' parameters differ.
        """
        for rank, report in enumerate(self.reports):
            if report.error is not None:
                raise RuntimeError(f"rank {rank}: {report.error}")
        check_parameters([report.table for report in self.reports])
        self._check_equal("void", "was converted to another dtype or device")
        self._check_equal("replaced", "had its gradient replaced between backward() and synchronize()")

    def _check_equal(self, attribute: str, what: str) -> None:
        sets = [set(getattr(report, attribute)) for report in self.reports]
        for rank, names in enumerate(sets):
            different = sorted(names ^ sets[0])
            if different:
                here, there = (rank, 0) if different[0] in names else (0, rank)
                raise RuntimeError(
                    f"parameter '{different[0]}' {what} on rank {here} but not on rank {there}; "
                    f"do the same on every rank"
                )

    @property
    def to_reduce(self) -> set[str]:
        """Names of the parameters whose true gradient has not been reduced in this step's buckets."""
        return set(self.reports[0].void) | set(self.reports[0].replaced)

    def used(self) -> list[bool]:
        """For each parameter, whether any rank has a gradient for it."""
        return [any(flags) for flags in zip(*(report.used for report in self.reports))]
