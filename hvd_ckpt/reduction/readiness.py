"""When is a parameter's gradient final?

A parameter's gradient may arrive in several parts: once per use in a recomputed segment, once per micro-batch. The number of
accumulations ("fires") between two synchronizations is learned, and a parameter is ready once it has fired that often.
"""

from __future__ import annotations

from collections.abc import Sequence


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

    def restore(self, expected: Sequence[int]) -> None:
        """Sets counts that were learned before."""
        self.expected = list(expected)
        self._lower = [-1] * len(self.expected)
        self.learned = True
