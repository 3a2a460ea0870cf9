"""Results of several calls of the command, in one file of JSON lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from hvd_ckpt.bench.faults.kill import Killed
from hvd_ckpt.bench.faults.save import SaveKill

__all__ = ["Recorded", "add_result", "load_results"]

Recorded = Killed | SaveKill


def load_results(path: Path) -> list[Recorded]:
    """The results in a file of JSON lines; of a seed that was run again only the last.

    Raises:
        ValueError: the file cannot be read or created, or a line is not a result; the message names file and line.
    """
    if not path.parent.is_dir():
        raise ValueError(f"the folder of '{path}' does not exist: create it, or give another file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read '{path}': {error}") from None
    reader: TypeAdapter[Recorded] = TypeAdapter(Annotated[Recorded, Field(discriminator="kind")])
    found: dict[object, Recorded] = {}
    for number, line in enumerate(lines, 1):
        try:
            one = reader.validate_json(line, strict=True)
        except ValidationError:
            raise ValueError(
                f"'{path}', line {number} is not a result of this test: give the file of an earlier call, or a new one"
            ) from None
        which = (one.number,) if isinstance(one, SaveKill) else (one.size, one.controller)
        found[one.kind, one.seed, which] = one
    return list(found.values())


def add_result(path: Path, result: Recorded) -> None:
    """Append a result to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")
