"""Damage: to bytes, to trees of plain values, to files."""

from __future__ import annotations

import copy
import math
import os
import pickle
from pathlib import Path
from random import Random
from typing import Any


class Executed:
    """A pickle of it runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


PICKLE = pickle.dumps(Executed())
RUBBISH = (
    b"", b"\0", b"\xff\xfe\x00", b"{", b"[" * 5000, b'{"a":' * 3000, b"null", b"1e999", b"9" * 6000, PICKLE, b"\x93NUMPY",
    b"PK\x03\x04",
)  # fmt: skip


def damaged(draw: Random, content: bytes, other: bytes = b"") -> bytes:
    """The content truncated, flipped, mixed up, replaced."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        size = len(data)
        way = draw.randrange(9)
        at = draw.randrange(size) if size else 0
        if way == 0:
            del data[at:]
        elif way in (1, 2) and size:
            data[at] ^= 1 << draw.randrange(8)
        elif way == 3 and size:
            data[at] = draw.choice((0, 255, 10, 34, 45, 48, 57, 91, 123))
        elif way == 4:
            del data[at : at + draw.randrange(1, 40)]
        elif way == 5:
            data[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif way == 6:
            end = at + draw.randrange(1, 80)
            data[at:at] = data[at:end]
        elif way == 7:
            data[at : at + draw.randrange(40)] = draw.choice(
                (*RUBBISH, other[: draw.randrange(len(other) + 1)])
            )
        else:
            data = bytearray(draw.choice((*RUBBISH, other)))
    return bytes(data)


NUMBERS = (
    0, 1, -1, 2, 7, 1.0, 0.5, -0.0, 1e308, -1e-320, math.inf, -math.inf, math.nan, 2**31, 2**63, -(2**63), 10**30, 10**400,
    True, False,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "nan", "-1", "1e9", "\n", "a\nb\x1b[31m", "\0", "\ud800", "../../outside/precious.txt", "/etc/passwd",
    "$tensor", "é" * 300, "%s{}", "__class__", "x" * 5000,
)  # fmt: skip


def odd_value(draw: Random, depth: int = 0) -> Any:
    """A value of any type that files can hold."""
    way = draw.randrange(8 if depth < 3 else 5)
    if way < 2:
        return draw.choice(NUMBERS)
    if way < 4:
        return draw.choice(TEXTS)
    if way == 4:
        return None
    inner = [odd_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    return inner if way < 7 else dict(zip(draw.sample(TEXTS, len(inner)), inner))


def changed(draw: Random, tree: Any, odd: Any = odd_value) -> Any:
    """A copy of a tree of dicts, lists and tuples with something in it replaced, removed, added or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        tree = _change(draw, tree, odd, 0.03)
    return tree


def _change(draw: Random, tree: Any, odd: Any, whole: float = 0.15) -> Any:
    if not isinstance(tree, (dict, list, tuple)) or not tree or draw.random() < whole:
        return _replaced(draw, tree, odd)
    if isinstance(tree, dict):
        key = draw.choice(list(tree))
        way = draw.random()
        if way < 0.15:
            return {name: one for name, one in tree.items() if name != key}
        if way < 0.25:
            return {**tree, draw.choice((*TEXTS, 5, None, True)): odd(draw)}
        if way < 0.3:
            other = draw.choice(list(tree))
            return {**tree, key: tree[other], other: tree[key]}
        return {**tree, key: _change(draw, tree[key], odd)}
    entries = list(tree)
    at = draw.randrange(len(entries))
    way = draw.random()
    if way < 0.12:
        del entries[at]
    elif way < 0.24:
        entries.insert(at, copy.deepcopy(draw.choice(entries)))
    else:
        entries[at] = _change(draw, entries[at], odd)
    return tuple(entries) if isinstance(tree, tuple) and draw.random() < 0.9 else entries


def _replaced(draw: Random, value: Any, odd: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw.random() < 0.5:
        small = abs(value) < 2**60  # and no nan
        return draw.choice((value + 1, -value, value * 10**6, value / 3 if small else 0.3, str(value)))
    return odd(draw)


def spoil(draw: Random, file: Path, other: bytes = b"") -> None:
    """Damages a file, or puts something else in its place."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 1 << 21:
        return  # it is spoilt already
    content = file.read_bytes()
    if draw.random() < 0.6:
        file.write_bytes(damaged(draw, content, other))
        return
    file.unlink()
    replace(draw, file, content)


def replace(draw: Random, file: Path, content: bytes) -> None:
    """Makes something of that name that is no plain file, or one that is odd."""
    outside = file.parent
    while outside.name != "input":
        outside = outside.parent
    outside = outside.parent / "outside"
    way = draw.randrange(9)
    if way == 0:
        file.mkdir()
    elif way == 1:
        os.mkfifo(file)
    elif way == 2:
        file.symlink_to(outside / "precious.txt")
    elif way == 3:
        file.symlink_to(draw.choice(("/dev/zero", "/dev/urandom", "/dev/null", "/", file.name, "nowhere")))
    elif way == 4:
        hidden = file.with_name(f"elsewhere-{file.name}")
        hidden.write_bytes(content)
        file.symlink_to(hidden.name)
    elif way == 5:  # huge, and holds nothing
        file.write_bytes(content)
        os.truncate(file, draw.choice((1 << 20, 1 << 40)))
    elif way == 6:
        file.write_bytes(PICKLE)
    elif way == 7:
        file.write_bytes(content)
        file.chmod(0)
