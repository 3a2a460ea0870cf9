"""One batch size on one number of ranks: the answers of all ranks, put together and judged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ckpt.bench.densenet.contenders import OURS, WANTED_MEMORY
from hvd_ckpt.bench.densenet.job import Answer, Entry
from hvd_ckpt.bench.harness.stats import Quartiles, quartiles, ratios

__all__ = ["WANTED_TIME", "Case"]

WANTED_TIME = 1.10  # of keeping everything


@dataclass
class Case:
    """What was found out about one batch size on one number of ranks.

    Attributes:
        size: number of ranks.
        batch: images of a step, over all ranks.
        threads: CPU threads of each rank.
        entries: contenders, in the order of the table; the first keeps everything.
        note: why there are none.
        failed: whether that is an error.
    """

    size: int
    batch: int
    threads: int
    entries: list[Entry]
    note: str | None = None
    failed: bool = False

    @classmethod
    def of(cls, size: int, batch: int, answers: Sequence[Answer]) -> Case:
        """From the answers of the ranks: the largest peak, rank 0's seconds, and what differs on any rank."""
        first = answers[0]
        merged = [_merged(entries) for entries in zip(*(answer.entries for answer in answers), strict=True)]
        return cls(size, batch, first.threads, merged, first.note, first.failed)

    @property
    def title(self) -> str:
        return f"{self.size} {'rank' if self.size == 1 else 'ranks'}, batch {self.batch}"

    @property
    def sound(self) -> bool:
        """Whether it ran, and this library trained right; a batch that does not fit and a budget that cannot be met are answers."""
        return not self.failed and not any(
            entry.differences for entry in self.entries if entry.family == OURS
        )

    def memory(self, entry: Entry) -> float | None:
        """Peak as a ratio to that of keeping everything."""
        keep = self.entries[0].peak_bytes
        return entry.peak_bytes / keep if entry.peak_bytes is not None and keep else None

    def time(self, entry: Entry) -> Quartiles | None:
        """Seconds of a step as a ratio to those of keeping everything in the same round."""
        values = ratios(entry.seconds, self.entries[0].seconds)
        return quartiles(values) if values else None

    def seconds(self, entry: Entry) -> float | None:
        """Of a step, the median over rounds."""
        return statistics.median(entry.seconds) if entry.seconds else None

    def met(self, entry: Entry) -> tuple[bool, bool] | None:
        """Whether memory and time, to the two digits that are shown, are those wanted; None for one that does not run."""
        memory, time = self.memory(entry), self.time(entry)
        if memory is None or time is None:
            return None
        return round(memory, 2) <= WANTED_MEMORY, round(time.median, 2) <= WANTED_TIME


def _merged(entries: Sequence[Entry]) -> Entry:
    first = entries[0]
    return Entry(
        first.name,
        first.family,
        max((entry.peak_bytes for entry in entries if entry.peak_bytes is not None), default=None),
        first.seconds,
        list(dict.fromkeys(what for entry in entries for what in entry.differences)),
        first.failure,
    )
