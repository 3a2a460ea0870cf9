"""Gradient accumulations: how many make a gradient ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A parameter's gradient may arrive in several parts: once per use in a recomputed segment, once per micro-batch. The number of
# accumulations between two synchronizations is learned, and a gradient is ready after as many.


class AccumulationCounts:
    """Learns how many accumulations each of ``n`` gradients takes between two synchronizations.

    A count rises at once. It falls only after two equal lower steps, so that one short step (the last, shorter accumulation group
    of an epoch, say) does not make the next full one late. ``expected`` is a plain list so that the hook which runs once per
    gradient costs two list look-ups.

    Attributes:
        arrived, expected: number of each parameter's accumulations in this step, and in the next ones.
        sequence: the parameters of this step's accumulations, one after the other.
    """

    def __init__(self, n: int) -> None:
        self.arrived: list[int] = [0] * n
        self.expected: list[int] = [0] * n
        self.sequence: list[int] = []
        self._lower: list[int] = [-1] * n
        self.learned = False

    def extend(self, n: int) -> None:
        """Adds ``n`` parameters that never arrived."""
        self.arrived.extend([0] * n)
        self.expected.extend([0] * n)
        self._lower.extend([-1] * n)

    def count(self, index: int) -> int:
        """Counts one accumulation; returns how often the parameter has arrived in this step."""
        self.sequence.append(index)
        self.arrived[index] += 1
        return self.arrived[index]

    @property
    def last_arrival(self) -> list[int]:
        """Place of each parameter's last accumulation in the sequence, from 1; 0 without one."""
        last = [0] * len(self.arrived)
        for place, index in enumerate(self.sequence, 1):
            last[index] = place
        return last

    def close_step(self, learn: bool = True) -> None:
        """Learns from this step's accumulations (unless ``learn`` is False) and starts the next step."""
        if learn and self.sequence:
            if not self.learned:
                self.expected = list(self.arrived)
                self.learned = True
            elif self.arrived != self.expected:
                # Expected is 4: after steps of 4, 3, 4 and 3 accumulations it still is; after 3
                # and 3 in a row it is 3; after 5 at once 5.
                for index, (arrived, expected) in enumerate(zip(self.arrived, self.expected)):
                    if arrived < expected and arrived != self._lower[index]:
                        self._lower[index] = arrived
                    else:
                        self.expected[index] = arrived
                        self._lower[index] = -1
            elif max(self._lower) >= 0:
                # The step was as expected, so a lower one before it was an exception and not the first of two.
                self._lower = [-1] * len(self._lower)
        self.arrived = [0] * len(self.arrived)
        self.sequence.clear()

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The learned counts by the parameters' names (None before the first step), and those of a first lower step."""
        lower = {name: count for name, count in zip(names, self._lower) if count >= 0}
        return {"counts": dict(zip(names, self.expected)) if self.learned else None, "lower_counts": lower}

    def load_state_dict(self, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Loads what was learned; a parameter that the state does not name has never arrived."""
        counts, lower = state["counts"], state["lower_counts"]
        self.learned = counts is not None
        self.expected = [int((counts or {}).get(name, 0)) for name in names]
        self._lower = [int(lower.get(name, -1)) for name in names]
