"""JSON lines from the ranks to the launcher: one file per rank, one event per line, read while they grow.

A line says what the rank does now, so that the launcher can tell slow from stuck; a number that JSON has no word for
(an infinite difference, a loss that is not a number) travels as the string Python has for it, and ``float()`` reads it.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Event", "EventReader", "EventWriter"]

Event = dict[str, Any]


class EventWriter:
    """Appends a rank's events to ``rank<rank>.jsonl`` in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "rank": self._rank, "time": time.time(), **values}
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class EventReader:
    """Reads what the ranks of one job have written since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """New events of all ranks, oldest first; a line that is not finished yet waits for the next call."""
        events: list[Event] = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as stream:
                stream.seek(self._read.get(path, 0))
                text = stream.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            events += [json.loads(line) for line in complete.splitlines()]
        return sorted(events, key=lambda event: float(event["time"]))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
