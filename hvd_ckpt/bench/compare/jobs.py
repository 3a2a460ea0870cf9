"""Jobs of the comparison: what the launcher tells the ranks, and the events that each rank writes while it works.

Events are JSON lines in one file per rank, which the launcher reads while they grow: they say what the rank does now, so that
slow can be told from stuck. An infinite difference or an undefined loss travels as text, which ``float()`` reads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from hvd_ckpt.bench.compare.cells import Cell, Settings
from hvd_ckpt.bench.harness.jobs import RankJob
from hvd_ckpt.bench.harness.report import plain

__all__ = ["Event", "EventReader", "EventWriter", "Job", "folder_name"]

Event = dict[str, Any]


@dataclass(frozen=True)
class Job(RankJob):
    """One launch: which engine trains which cells, and how.

    Attributes:
        references: the folder of the references, one file per workload, and of the plans.
        engine: a name in the registry of engines, or ``module:Class``.
        cells: keys of the cells, in the order in which they are trained.
        settings: of each training run.
        checks: each cell is trained twice, with its reductions recorded, and the second time its memory; otherwise
            once, with nothing that takes time.
        environment: variables that a rank sets before it starts the engine.
    """

    worker = "hvd_ckpt.bench.compare.worker"

    references: Path
    engine: str
    cells: tuple[str, ...]
    settings: Settings
    checks: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def workloads(self) -> list[str]:
        """The workloads of the cells, each once, in order."""
        return list(dict.fromkeys(Cell.from_key(key).workload for key in self.cells))

    def reference_file(self, workload: str) -> Path:
        """The reference of a workload."""
        return self.references / f"reference-{workload}.pt"

    def plan_file(self, workload: str) -> Path:
        """The plan of a workload, for the engine's later jobs."""
        return self.references / f"plan-{folder_name(self.engine)}-{workload}.json"


def folder_name(engine: str) -> str:
    """An engine's name as a file system takes it."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in engine)


class EventWriter:
    """Appends a rank's events to ``rank<rank>.jsonl`` in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "rank": self._rank, "time": time.time(), **values}
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class EventReader:
    """Reads the events that the ranks of one job have written since the last call."""

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
