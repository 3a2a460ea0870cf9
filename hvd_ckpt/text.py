"""Texts: names of settings, messages about unknown ones, and byte sizes. Importing it imports no PyTorch, so that help is quick."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CHECKPOINTS = ("always", "except_last", "never")
"""Which micro-batches :func:`hvd_ckpt.accumulate` recomputes."""

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt", "step")
"""Decays of the learning rate."""

PRECISIONS = ("fp32", "fp16", "bf16", "apex-O0", "apex-O1", "apex-O2", "apex-O3")
"""Recipes of :class:`hvd_ckpt.Precision`."""

LONGEST = 900  # characters of a message


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, whatever the case and the kind of dash; None if none does."""
    plain = {_plain(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[found[0]] if found else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line for an error: ``no optimizer 'adamv': did you mean 'adamw'? Known: adam, adamw, sgd``.

    Args:
        what: the kind of thing that was asked for.
        name: as it was given.
        known: the right names, listed in this order.
    """
    known = list(known)
    if not known:
        return f"no {what} '{name}': there is none"
    guess = nearest(name, known)
    hint = f": did you mean '{guess}'?" if guess else "."
    return f"no {what} '{name}'{hint} Known: {', '.join(known)}"


def one_line(message: str) -> str:
    """A message as one line of printable characters, cut in the middle if it is very long: it may quote what somebody has made."""
    if not message.isprintable():
        message = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in message)
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 300]} ... {message[-290:]}"


def show_bytes(count: int) -> str:
    """``1.50 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")
