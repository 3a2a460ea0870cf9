"""Commands that tests of an installation run, and programs of a few lines in their place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_program(path: Path, script: str, shell: str = "/bin/sh") -> Path:
    """Writes a program for a shell; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shell}\n{script}\n")
    path.chmod(0o755)
    return path


def run_command(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] = os.environ, **streams: Any
) -> Any:
    """Runs a command to its end; all that it says is kept, unless it gets other streams."""
    streams = streams or {"stdin": subprocess.DEVNULL, "capture_output": True}
    return subprocess.run(words, cwd=cwd, env=env, text=True, timeout=120, check=False, **streams)
