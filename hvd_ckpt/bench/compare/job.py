"""A job: what the launcher tells the processes it starts, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.compare.cells import Cell

__all__ = ["Job", "folder_name"]


@dataclass(frozen=True)
class Job:
    """One launch: which engine trains which cells, and how.

    Attributes:
        folder: where the job file, the log and the ranks' events of this launch lie.
        references: where the references lie, one file per workload, and the plans.
        engine: a name in the registry of engines, or ``module:Class``.
        cells: keys of the cells, in the order in which they are trained.
        size: number of ranks.
        steps: steps of each training run.
        seed: of weights, batches and random states.
        scale: of the workloads, such as ``default``.
        text: a file of text, or None for the standard library's source.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``apex-O1``.
        device: ``cpu`` or ``cuda``.
        checks: each cell is trained twice, with its reductions recorded, and the second time its memory; otherwise
            once, with nothing that takes time.
        environment: variables that a rank sets before it starts the engine.
    """

    folder: Path
    references: Path
    engine: str
    cells: tuple[str, ...]
    size: int
    steps: int
    seed: int
    scale: str
    text: str | None
    precision: str = "fp32"
    device: str = "cpu"
    checks: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    @property
    def workloads(self) -> list[str]:
        """The workloads of the cells, each once, in order."""
        return list(dict.fromkeys(Cell.from_key(key).workload for key in self.cells))

    def reference_file(self, workload: str) -> Path:
        return self.references / f"reference-{workload}.pt"

    def plan_file(self, workload: str) -> Path:
        """Where the plan of a workload lies for the engine's later jobs."""
        return self.references / f"plan-{folder_name(self.engine)}-{workload}.json"

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {**dataclasses.asdict(self), "folder": str(self.folder), "references": str(self.references)}
        self.file.write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Job:
        values = json.loads(file.read_text())
        values.update(
            folder=Path(values["folder"]), references=Path(values["references"]), cells=tuple(values["cells"])
        )
        return cls(**values)


def folder_name(engine: str) -> str:
    """An engine's name as a file system takes it."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in engine)
