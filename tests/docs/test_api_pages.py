"""The API reference has an entry for each public name, and no entry for a name that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import hvd_ckpt

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"


def test_every_public_name_has_an_entry() -> None:
    documented = set()
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        documented.update(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE))
        if page.name == "horovod.md":
            documented.update(re.findall(r"`(\w+)`", text))
    assert set(hvd_ckpt.__all__) <= documented, sorted(set(hvd_ckpt.__all__) - documented)
    index = set(re.findall(r"`(\w+)`", (PAGES / "index.md").read_text(encoding="utf-8")))
    assert index - {"hvd_ckpt"} <= set(hvd_ckpt.__all__)
