"""What every job of ranks has: a folder with what the launcher tells the ranks, and what each of them answers, as JSON files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from hvd_ckpt.json_file import write_json

__all__ = ["RankJob"]


@dataclass(frozen=True)
class RankJob:
    """Ranks that are started together; fields of subclasses are numbers, texts, None and tuples of such.

    Attributes:
        folder: of this job alone.
        size: number of ranks.
    """

    folder: Path
    size: int

    @property
    def file(self) -> Path:
        """What the ranks are told."""
        return self.folder / "job.json"

    def answer_file(self, rank: int) -> Path:
        """Where a rank answers."""
        return self.folder / f"rank{rank}.json"

    def save(self) -> None:
        """Makes the folder and writes :attr:`file`."""
        self.folder.mkdir(parents=True)
        write_json({**dataclasses.asdict(self), "folder": str(self.folder)}, self.file)

    @classmethod
    def load(cls, file: Path) -> Self:
        """The job that :meth:`save` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        values.update({name: tuple(value) for name, value in values.items() if isinstance(value, list)})
        return cls(**{**values, "folder": Path(values["folder"])})
