"""All kinds of inputs."""

from __future__ import annotations

import data
import settings
import snapshots
from fuzzing import Kind

MODULES = (snapshots, settings, data)


def kinds_of(names: str = "") -> list[Kind]:
    """The kinds of these names, separated by commas; all without any."""
    wanted = {name for name in names.split(",") if name}
    found = [kind() for module in MODULES for kind in module.KINDS]
    unknown = wanted - {kind.name for kind in found}
    if unknown:
        raise SystemExit(f"no kind '{min(unknown)}': there are {', '.join(kind.name for kind in found)}")
    return [kind for kind in found if not wanted or kind.name in wanted]
