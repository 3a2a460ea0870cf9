"""What several calls of the tests have found, one result a line of JSON, so that runs over many seeds add up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hvd_ckpt.bench.faults.kill import Killed
from hvd_ckpt.bench.faults.save import SaveKill

__all__ = ["Records"]


class Records:
    """The results in a file, each of a seed once: the last one counts.

    Args:
        path: of the file; made when the first result is added.

    Raises:
        ValueError: it cannot be read, or a line is no result; the message names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[tuple[Any, ...], Killed | SaveKill] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if not path.parent.is_dir():
                raise ValueError(f"the folder of '{path}' does not exist: make it, or give another file")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read '{path}': {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                self._keep(_result(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(
                    f"'{path}', line {number} is no result of this test: give the file of an earlier call, or a new one"
                ) from None

    @property
    def killed(self) -> list[Killed]:
        """Of the kill test."""
        return [one for one in self._found.values() if isinstance(one, Killed)]

    @property
    def saves(self) -> list[SaveKill]:
        """Of the save test."""
        return [one for one in self._found.values() if isinstance(one, SaveKill)]

    @property
    def next_seed(self) -> int:
        """The first after all that are there."""
        return max((one.seed for one in self._found.values()), default=0) + 1

    def add(self, result: Killed | SaveKill) -> None:
        """Appends a result to the file, with the operating system when this returns."""
        self._keep(result)
        kind = "kill" if isinstance(result, Killed) else "save"
        line = json.dumps({"kind": kind, **dataclasses.asdict(result)}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _keep(self, result: Killed | SaveKill) -> None:
        if isinstance(result, Killed):
            self._found["kill", result.seed, result.size, result.controller] = result
        else:
            self._found["save", result.seed, result.number] = result


def _result(record: dict[str, Any]) -> Killed | SaveKill:
    kind = {"kill": Killed, "save": SaveKill}[record.pop("kind")]
    result: Killed | SaveKill = kind(**record)
    if type(result.seed) is not int:
        raise ValueError(result.seed)
    return result
