"""Hypothesis draws of hostile values, and damage to bytes, to nested values and to files."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PRECIOUS = "nobody may touch this\n" * 3


class Executed:
    """A pickle of it runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


PICKLE = pickle.dumps(Executed())
RUBBISH = (
    b"", b"\0", b"\xff\xfe\x00", b"{", b"[" * 5000, b'{"a":' * 3000, b"null", b"1e999", b"9" * 6000, PICKLE, b"\x93NUMPY",
    b"PK\x03\x04",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 1.0, 0.5, -0.0, 1e308, -1e-320, math.inf, -math.inf, math.nan, 2**31, 2**63, -(2**63), 10**30, 10**400, True,
    False,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "nan", "-1", "1e9", "\n", "a\nb\x1b[31m", "\0", "\ud800", "../../outside/precious.txt", "/etc/passwd", "é" * 300,
    "%s{}", "__class__", "x" * 5000,
)  # fmt: skip
ODD: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=2),
    max_leaves=6,
)
"""A value of any type that a JSON or YAML file can hold."""


class Draw:
    """Draws of one input, which Hypothesis makes simpler when it ends in a finding."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.watched: Any = lambda on=True: nullcontext()

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        with self.watched(False):  # Hypothesis itself may write
            return copy.deepcopy(self._data.draw(strategy))

    def choice(self, *options: Any) -> Any:
        return self(st.sampled_from(options))

    def below(self, stop: int) -> int:
        return self(st.integers(0, max(stop, 1) - 1))

    def chance(self, probability: float) -> bool:
        return self.below(100) >= 100 * (1 - probability)

    def damaged(self, content: bytes, other: bytes = b"") -> bytes:
        """The content truncated, flipped, mixed up or replaced."""
        for _ in range(self.choice(1, 1, 1, 2, 5)):
            at, way, rubbish = self.below(len(content)), self.below(6), self.choice(*RUBBISH, other)
            if way == 0:
                content = content[:at]
            elif way == 1:
                content = rubbish
            elif way == 2 and content:
                content = content[:at] + bytes([content[at] ^ (1 << self.below(8))]) + content[at + 1 :]
            elif way == 3:
                content = content[:at] + self(st.binary(max_size=40)) + content[at:]
            else:
                content = content[:at] + (rubbish if way == 4 else b"") + content[at + self.below(40) :]
        return content

    def changed(self, value: Any, leaf: st.SearchStrategy[Any] = ODD) -> Any:
        """A copy of nested values with something in it replaced, removed, added or exchanged."""
        value = copy.deepcopy(value)
        for _ in range(self.choice(1, 1, 1, 2, 4)):
            value = self._change(value, leaf, 0.03)
        return value

    def _change(self, value: Any, leaf: st.SearchStrategy[Any], whole: float = 0.15) -> Any:
        if not isinstance(value, (dict, list, tuple)) or not value or self.chance(whole):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and self.chance(0.5):
                small = abs(value) < 2**60  # and not nan
                return self.choice(value + 1, -value, value * 10**6, value / 3 if small else 0.3, str(value))
            return self(leaf)
        entries = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        way, key, other = self.below(20), self.choice(*entries), self.choice(*entries)
        if way < 3:
            del entries[key]
        elif way < 5:
            entries[self.choice(*TEXTS, 5, None, True)] = self(leaf)
        elif way < 6:
            entries[key], entries[other] = entries[other], entries[key]
        else:
            entries[key] = self._change(entries[key], leaf)
        return entries if isinstance(value, dict) else type(value)(entries.values())

    def flip(self, file: Path) -> None:
        """Changes one bit."""
        if _is_spoilt(file):
            return
        content = bytearray(file.read_bytes())
        if content:
            content[self.below(len(content))] ^= 1 << self.below(8)
            file.write_bytes(content)

    def spoil(self, file: Path, other: bytes = b"") -> None:
        """Damages a file, or puts something else in its place."""
        if _is_spoilt(file):
            return
        content = file.read_bytes()
        if self.chance(0.6):
            file.write_bytes(self.damaged(content, other))
        else:
            self.replace(file, content)

    def replace(self, file: Path, content: bytes) -> None:
        """Makes something of that name that is not a plain file, or an odd one, or nothing."""
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        root = next(one.parent for one in file.parents if one.name == "input")
        way = self.below(9)
        if way == 0:
            file.mkdir()
        elif way == 1:
            os.mkfifo(file)
        elif way == 2:
            file.symlink_to(root / "outside" / "precious.txt")
        elif way == 3:
            file.symlink_to(
                self.choice("/dev/zero", "/dev/urandom", "/dev/null", "/dev", file.name, "nowhere")
            )
        elif way == 4:
            hidden = file.with_name(f"elsewhere-{file.name}")
            hidden.write_bytes(content)
            file.symlink_to(hidden.name)
        elif way < 8:
            file.write_bytes(PICKLE if way == 6 else content)
            if way == 5:  # huge, and holds nothing
                os.truncate(file, self.choice(1 << 20, 1 << 40))
            if way == 7:
                file.chmod(0)


def _is_spoilt(file: Path) -> bool:
    """Whether :meth:`Draw.replace` has made something of a file, which may be endless."""
    return file.is_symlink() or not file.is_file() or file.stat().st_size > 1 << 21
