"""JSON files: written in lines of a readable length, and read without trust.

``json.dumps`` writes one line, or every number in a line of its own, and ``json.loads`` accepts NaN, keys that are given twice
(and drops the first), and any depth and size. The functions here do not.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 64 << 20
WIDTH = 120  # of a line, where it can be broken


class Wrong(Exception):
    """An error in a file or a state: its reason and the way out, for the caller to make a sentence of."""


def write_json(value: Any, path: Path) -> None:
    """Writes a value of dicts, lists, texts and finite numbers; the file is there completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_text(dumps(value), path)


def write_text(text: str, path: Path) -> None:
    """Writes a text; the file is there completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    unnamed = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(unnamed, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    except BaseException:
        unnamed.unlink(missing_ok=True)
        raise


def dumps(value: Any) -> str:
    """A value of dicts, lists, texts and finite numbers as JSON in lines of a readable length."""
    return "\n".join(_lines(value)) + "\n"


def read_json(path: Path, give: str, repair: str) -> Any:
    """The value in a file.

    Args:
        give: the way out if the file is of another kind, such as "give a file that Plan.save() wrote".
        repair: the way out if it is damaged, such as "make the plan again".

    Raises:
        Wrong: it is not a regular file, too large, not UTF-8, not valid JSON, too deep, or has a number that is not finite or a key
            twice.
        OSError: it cannot be read.
    """
    return loads(read_bytes(path, give), give, repair)


def read_bytes(path: Path, give: str) -> bytes:
    """The content of a file, or its first bytes if it is larger than :func:`loads` takes.

    Raises:
        Wrong: it is not a regular file.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise Wrong(f"it is a folder or a device: {give}")
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def loads(content: bytes, give: str, repair: str) -> Any:
    """The value in the content of a file, as :func:`read_json`.

    Raises:
        Wrong: as :func:`read_json`.
    """
    if len(content) > MAX_BYTES:
        raise Wrong(f"it is larger than {MAX_BYTES >> 20} MiB: {give}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Wrong(f"byte {error.start} is not UTF-8: {give}") from None
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:]
        raise Wrong(
            f"it is not valid JSON, line {error.lineno} column {error.colno}: {what}: {repair}"
        ) from None
    except RecursionError:
        raise Wrong(f"it is nested too deeply: {repair}") from None
    except _Refused as error:
        raise Wrong(f"{error}: {repair}") from None
    except ValueError:  # an integer of thousands of digits
        raise Wrong(f"a number in it has too many digits: {repair}") from None


class _Refused(Exception):
    """JSON that Python's decoder accepts and these functions do not."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {shown(twice)} is given twice in one place")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"it has the value {name}, and numbers must be finite")


def shown(value: Any) -> str:
    """A value in a message, in one line and short."""
    if isinstance(value, int) and not -(2**70) < value < 2**70:
        return "a very large number"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:50] + "..." + text[-1]


def _lines(value: Any, indent: str = "", before: str = "") -> Iterator[str]:
    """A value of dicts, lists, texts and finite numbers as the lines of its JSON.

    What fits in one line is in one, and short entries of a list share lines. ``before`` stands in front of it.
    """
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(before) + len(flat) <= WIDTH or not isinstance(value, (dict, list)):
        yield f"{indent}{before}{flat}"
        return
    inner = indent + " "
    yield f"{indent}{before}{'{' if isinstance(value, dict) else '['}"
    if isinstance(value, dict):
        parts = [
            list(_lines(one, inner, f"{json.dumps(name, ensure_ascii=False)}: "))
            for name, one in value.items()
        ]
    else:
        parts = [list(_lines(one, inner)) for one in value]
    line = ""
    for at, part in enumerate(parts):
        part[-1] += "," if at + 1 < len(parts) else ""
        short = isinstance(value, list) and len(part) == 1 and not isinstance(value[at], dict)
        if short and line and len(line) + 1 + len(part[0].strip()) <= WIDTH:
            line += " " + part[0].strip()
        else:
            if line:
                yield line
            line = part[-1]
            yield from part[:-1]
    yield line
    yield f"{indent}{'}' if isinstance(value, dict) else ']'}"
