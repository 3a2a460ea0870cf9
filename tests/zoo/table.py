"""The page docs/zoo.md from what `python tests/seeds.py zoo` and `zoo-ranks` have printed."""

# ruff: noqa: E501 - lines of Markdown

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import defaultdict
from typing import Any

TITLES = {
    "segments": "segments, non-reentrant",
    "reentrant": "segments, reentrant",
    "min": 'plan `"min"`, `chunk_head=False`',
    "half": 'plan `"0.5x"`, `chunk_head=False`',
    "chunks": 'plan `"min"`, language models with their head',
    "stage 3": '`shard="parameters"`, two ranks',
}
RIGHT = ("equal", "rounding", "refused")
LEFT_OUT = ("untrainable", "random")
HEAD = """# Zoo of architectures

```bash
python tests/seeds.py zoo --number 700 >zoo.txt           # all in every way of recomputation
python tests/seeds.py zoo-ranks --number 700 >>zoo.txt    # with sharded parameters, on two ranks
python tests/zoo/table.py <zoo.txt                        # this page
python tests/seeds.py zoo --only gpt2:causal_lm
```

Every architecture of transformers that builds from a small random configuration trains for two steps, with dropout, in plain PyTorch and
in every way of recomputation and sharding. Loss, gradients, buffers and random state must have the same bits, or an error says in one sentence why not. Plans recompute at any cost; for stage 3 the reference is `shard="none"` on the same ranks."""


Rows = dict[tuple[str, str], dict[str, Any]]
"""Rows by name and mode."""


def page(rows: Rows) -> str:
    """The page in Markdown."""
    import torch
    import transformers

    out = {name for (name, _), row in rows.items() if row["outcome"] in LEFT_OUT}
    left = {key: row for key, row in sorted(rows.items()) if key[0] not in out}
    trained = {name for name, _ in left}
    chosen: dict[str, Rows] = defaultdict(dict)
    for key, row in left.items():
        chosen[row["outcome"] if row["outcome"] in RIGHT else "wrong"][key] = row
    right = len(trained) - len({name for name, _ in chosen["wrong"]})
    packages = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"
    lines = [
        HEAD,
        "",
        f"{packages}, {os.cpu_count()} CPUs ({platform.machine()}), one thread per process.",
        "",
        f"**{right} of {len(trained)} architectures are right in each way that the table counts.**",
        "",
        "| | architectures | same bits | rounding | one clear sentence | not right |",
        "|---|---|---|---|---|---|",
    ]
    for mode, title in TITLES.items():
        kinds = [kind for kind, found in chosen.items() for _, other in found if other == mode]
        if kinds:
            numbers = " | ".join(str(kinds.count(kind)) for kind in (*RIGHT, "wrong"))
            lines.append(f"| {title} | {len(kinds)} | {numbers} |")
    lines += ["", *_reasons("Not right", chosen["wrong"])]
    lines += _reasons("Rounding", chosen["rounding"], detail=False)
    lines += _reasons("Errors that say so", chosen["refused"])
    lines.append(
        f"{len(out)} further names of transformers are left out: most do not build or train from a small configuration and a "
        "guessed sample."
    )
    return "\n".join(lines)


def _reasons(title: str, rows: Rows, detail: bool = True) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, mode), row in rows.items():
        groups[mode, _reason(row) if detail else "in the last bits"].append(name)
    lines = [f"## {title}", "", "| way | reason | architectures |", "|---|---|---|"]
    for (mode, why), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        which = ": " + ", ".join(f"`{name}`" for name in found) if detail else ""
        lines.append(f"| {TITLES.get(mode, 'plain PyTorch')} | {why} | {len(found)}{which} |")
    return [*lines, ""] if rows else []


def _reason(row: dict[str, Any]) -> str:
    """The outcome in words, with numbers and names taken out so that like ones meet."""
    text = row["detail"].split(";")[0]
    text = re.sub(r"^(narrow|short|16|8): (ValueError: )?", "", text)
    text = re.sub(r"\b(gradient|buffer) (\d )?(of )?\S+ ", r"\1 ", text)
    text = re.sub(r"in this \w+", "in this model", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)
    return f"{row['outcome']}: {text[:160]}".replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    found = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    print(page({(row["name"], row["mode"]): row for row in found}))
