"""Folders for the output of commands and runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path:
    """The folder for files that are kept between runs: ``$XDG_CACHE_HOME/hvd_ckpt`` or ``~/.cache/hvd_ckpt``, or the same in the
    Python environment, where that cannot be written.

    Raises:
        OSError: neither is writable. The message is one sentence.
    """
    reasons = []
    for base in (os.environ.get("XDG_CACHE_HOME") or "~/.cache", f"{sys.prefix}/.cache"):
        try:
            folder = Path(base).expanduser() / "hvd_ckpt"
            make_writable(folder)
            return folder
        except (OSError, RuntimeError) as error:  # no HOME, and no entry in the password file
            reasons.append(f"{base} cannot be used ({getattr(error, 'strerror', None) or error})")
    raise OSError(f"{'; '.join(reasons)}: name a folder that can be written with XDG_CACHE_HOME")


def make_writable(folder: Path) -> None:
    """Creates a folder unless it exists, and tries to write to it.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Tried, since os.access() knows nothing of quotas or of servers that refuse what the mode allows.
    with tempfile.TemporaryFile(dir=folder):
        pass


def new_folder(name: str | None, kind: str, make: bool = True, unfinished: Iterable[str] = ()) -> Path:
    """Creates an empty folder with this name; by default ``runs/<kind>-<time>``.

    Args:
        make: whether to create the folder. If not, the function only checks whether it could.
        unfinished: patterns of names that may be there, since a start that was killed leaves them.

    Raises:
        ValueError: the folder holds something else or cannot be written to.
    """
    folder = Path(name) if name else Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if folder.exists() and any(
            not any(path.match(pattern) for pattern in unfinished) for path in folder.iterdir()
        ):
            raise ValueError(f"the folder '{folder}' is not empty: give a new one")
    except OSError as error:
        raise ValueError(f"cannot write to '{folder}': {error.strerror}") from None
    return folder.resolve()
