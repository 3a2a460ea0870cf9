"""JSON files that people can read and that nobody has to trust.

``json.dumps`` writes either one line or every number in a line of its own, and ``json.loads`` takes NaN, keys that are
given twice (and forgets the first), and any depth and size. These do not.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["AGAIN", "MAX_BYTES", "Wrong", "read_json", "shown", "write_json"]

MAX_BYTES = 64 << 20
WIDTH = 120  # of a line, where it can be broken
AGAIN = "correct it, or make the plan again"


class Wrong(Exception):
    """What is wrong and the way out, to become a sentence."""


def write_json(value: Any, path: Path) -> None:
    """Writes a value of dicts, lists, texts and finite numbers; the file is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    whole = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(whole, "x", encoding="utf-8") as file:
            file.write("\n".join(_lines(value)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """The value in a file.

    Raises:
        Wrong: it is no regular file, too large, no UTF-8, no JSON, too deep, or has a number that is none or a key twice.
        OSError: it cannot be read.
    """
    return _json(_content(path))


def _content(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):
        raise Wrong("it is a folder or a device: give the name of a file that Plan.save() wrote")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise Wrong(
            f"it is larger than {MAX_BYTES >> 20} MiB, which no plan is: give a file that Plan.save() wrote"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Wrong(f"byte {error.start} is no UTF-8: give a file that Plan.save() wrote") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:]
        raise Wrong(f"it is no JSON, line {error.lineno} column {error.colno}: {what}: {AGAIN}") from None
    except RecursionError:
        raise Wrong(f"it is nested too deeply: {AGAIN}") from None
    except ValueError:  # an integer of thousands of digits
        raise Wrong(f"a number in it has too many digits: {AGAIN}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Wrong(f"the key {shown(twice)} is given twice in one place: {AGAIN}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise Wrong(f"it has the value {name}, and numbers must be finite: {AGAIN}")


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
