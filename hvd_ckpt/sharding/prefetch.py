"""The order in which units are gathered, with which the next unit is gathered while the current one computes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Pass:
    """One forward or backward pass.

    Attributes:
        kind: passes of one kind that begin with the same unit are assumed to be equal.
        taken: the units gathered so far.
        learned: those of the last pass like it, while this one is like it.
        differentiated: it is a backward pass that makes a graph of its own (``create_graph=True``).
    """

    kind: str
    taken: list[int] = field(default_factory=list)
    learned: list[int] | None = None
    differentiated: bool = False


class PrefetchOrder:
    """The order in which units are gathered: learned in one pass, used in the next one of its kind to begin early.

    All ranks do the same work, so all learn the same order and begin early with the same unit.
    """

    def __init__(self) -> None:
        self._learned: dict[tuple[str, int], list[int]] = {}

    def next(self, current: Pass, unit: int) -> list[int]:
        """Notes that ``unit`` is gathered now.

        Returns:
            The two units that came next in the last pass, or what there is of them; none where this pass is another one than that.
        """
        if not current.taken:
            current.learned = self._learned.get((current.kind, unit))
        position = len(current.taken)
        current.taken.append(unit)
        learned = current.learned
        if learned is None or position >= len(learned) or learned[position] != unit:
            # From here on this pass is another one than the last: nothing more is begun early, and its own order is learned.
            current.learned = None
            return []
        return learned[position + 1 : position + 3]

    def end(self, finished: Pass) -> None:
        """The pass was this one."""
        if finished.taken:
            self._learned[finished.kind, finished.taken[0]] = finished.taken
