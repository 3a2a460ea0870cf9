"""Folders for what commands and runs write."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["new_folder"]


def new_folder(name: str | None, kind: str) -> Path:
    """A folder, made and empty: that of the name, else ``runs/<kind>-<time>``.

    Raises:
        ValueError: it holds something, or cannot be written to.
    """
    folder = Path(name) if name else Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(not path.name.startswith(".config.yaml.") for path in folder.iterdir()):  # begun, and killed
            raise ValueError(f"the folder '{folder}' is not empty: give a new one")
    except OSError as error:
        raise ValueError(f"cannot write to '{folder}': {error.strerror}") from None
    return folder.resolve()
