"""When is a parameter's gradient final?

A parameter's gradient may arrive in several parts: once per use in a recomputed segment, once per micro-batch. The number of
accumulations ("fires") between two synchronizations is learned, and a parameter is ready once it has fired that often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class FireCounts:
    """Learns how often each of ``n`` parameters fires between two synchronizations.

    A count rises at once; it falls only after two equal lower steps, so that one short step (the last, shorter accumulation
    group of an epoch, say) does not make the next full one late. ``expected`` is a plain list so that the hook which runs once
    per gradient costs two list look-ups.
    """

    def __init__(self, n: int) -> None:
        self.fired: list[int] = [0] * n
        self.expected: list[int] = [0] * n
        self.last_fire: list[int] = [
            0
        ] * n  # position in this step's sequence of fires, from 1; 0 if it did not fire
        self._lower: list[int] = [-1] * n
        self._clock = 0
        self.learned = False

    def extend(self, n: int) -> None:
        """Adds ``n`` parameters that never fired."""
        for counts, value in ((self.fired, 0), (self.expected, 0), (self.last_fire, 0), (self._lower, -1)):
            counts.extend([value] * n)

    def fire(self, index: int) -> int:
        """Counts one accumulation; returns how often the parameter has fired in this step."""
        self._clock += 1
        self.last_fire[index] = self._clock
        self.fired[index] += 1
        return self.fired[index]

    def forget(self, indices: Iterable[int]) -> None:
        """Forgets this step's fires of some parameters."""
        for index in indices:
            self.fired[index] = self.last_fire[index] = 0
        self._clock *= any(self.fired)

    def close_step(self, learn: bool = True) -> None:
        """Learns from this step's fires (unless told not to) and starts the next step."""
        if learn and self._clock:
            if not self.learned:
                self.expected = list(self.fired)
                self.learned = True
            elif self.fired != self.expected:
                for index, (fired, expected) in enumerate(zip(self.fired, self.expected)):
                    if fired < expected and fired != self._lower[index]:
                        self._lower[index] = fired
                    else:
                        self.expected[index] = fired
                        self._lower[index] = -1
            elif max(self._lower) >= 0:
                self._lower = [-1] * len(self._lower)
        self.fired = [0] * len(self.fired)
        self.last_fire = [0] * len(self.last_fire)
        self._clock = 0

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """What was learned, by the parameters' names: the counts (None before the first step), and those of a first lower step."""
        lower = {name: count for name, count in zip(names, self._lower) if count >= 0}
        return {"counts": dict(zip(names, self.expected)) if self.learned else None, "lower_counts": lower}

    def load_state_dict(self, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Loads what was learned; a parameter that the state does not name has never fired."""
        counts, lower = state["counts"], state["lower_counts"]
        self.learned = counts is not None
        self.expected = [int((counts or {}).get(name, 0)) for name in names]
        self._lower = [int(lower.get(name, -1)) for name in names]
