"""Logs of runs: records, one line of JSON each.

A record is a flat dictionary. Those of a training run have these keys, and more for metrics:

    step            optimizer steps taken
    kind            ``train`` or ``eval``
    loss            mean since the previous record; of an evaluation, over all its samples
    lr              learning rate of the last step
    rate, unit      units per second over all ranks, and what they are: ``tokens``, ``images``, ...
    memory          peak bytes of the process; ``memory_of`` names the kind of memory
    divergence      with local SGD, the ranks' distance to the average before, in the last average
    seconds         of training since the record before, without evaluations and snapshots; of an evaluation, its own
    step_seconds    of a step; ``data_seconds``, ``forward_seconds``, ...: its parts, see :data:`hvd_ckpt.utils.spans.KINDS`.
                    Means over steps and ranks

Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_ckpt.utils.spans import KINDS

TIMES = ("step_seconds", *(f"{kind}_seconds" for kind in KINDS))
KEYS = (  # the others are metrics
    "step", "kind", "loss", "lr", "rate", "unit", "memory", "memory_of", "samples", "seconds", *TIMES,
)  # fmt: skip
MAX_BYTES = 1 << 30


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``log.jsonl``; a last line that a killed process left unfinished is left out.

    Raises:
        ValueError: the file cannot be read, or a line is not a record; the message names file and line.
    """
    return [record for _, record in _records(Path(path))]


class Logs(AbstractContextManager["Logs"]):
    """The log of a run, ``log.jsonl``. A context manager that closes it.

    A line is with the operating system as soon as ``write`` returns. JSON has no infinities: numbers that are not finite become
    ``"nan"``, ``"inf"`` and ``"-inf"``, which :func:`read` turns back.

    Args:
        step: steps taken; records of later steps are dropped, since a resumed run writes them again.

    Raises:
        ValueError: a line of the log is not a record.
        OSError: the log cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        self.path = Path(folder) / "log.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = _records(self.path) if self.path.exists() else []
        # A resumed run writes records anew from its snapshot on. A line that a killed process left unfinished goes, too.
        end = next((start for start, record in records if record.get("step", step) > step), None)
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1 if end is None else end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record. Values are numbers, strings, booleans or None.

        Raises:
            OSError: it cannot be written, such as to a full disk; nothing is then.
        """
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = json.dumps(values, ensure_ascii=False).encode()
        end = self._file.seek(0, os.SEEK_END)
        # A full disk may take a part of a line. It is removed again, so that the file has whole lines only.
        if self._file.write(line + b"\n") <= len(line):
            self._file.truncate(end)
            raise OSError(f"the disk of '{self.path}' is full")

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every record in complete lines, with the offset of its first byte."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError(f"log '{path}': missing, not a file, or larger than {MAX_BYTES >> 30} GiB")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the log '{path}': {error.strerror}") from None
    records, start = [], 0
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
            raise ValueError(
                f"log '{path}', line {number}: not a record, which is a JSON object with a whole step"
            )
        known = {
            name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in record.items()
        }
        records.append((start, known))
        start += len(line)
    return records
