"""The report of the checks, from JUnit's file: a row for each, and the facts of the machine."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


def rows_of(junit: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each check, and the facts of the machine."""
    rows, facts = [], dict[str, str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        name, _, check = case.get("name", "").partition("[")
        found = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        facts |= json.loads(found.get("facts", "{}"))
        row = {
            "name": check.rstrip("]") or name.removeprefix("test_"),
            "ranks": int(found.get("ranks", 0)),
            "verdict": PASSED,
            "seconds": float(case.get("time", 0)),
            "text": found.get("found", ""),
            "values": json.loads(found.get("values", "{}")),
        }
        for kind, verdict in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
            told = case.find(kind)
            if told is not None:
                row["verdict"] = verdict
                row["text"] = (
                    (told.get("message") or told.text or "").strip().split("\n")[0].removeprefix("Failed: ")
                )
        rows.append(row)
    return rows, facts


def write(junit: Path, folder: Path, device: str) -> bool:
    """Writes ``report.md`` and ``results.json`` into the folder; returns whether nothing failed."""
    rows, facts = rows_of(junit)
    counts = Counter(row["verdict"] for row in rows)
    conclusion = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (PASSED, FAILED, SKIPPED))
    page = [f"# Checks on {'a GPU' if device == 'cuda' else 'the CPU: a dry run'}", "", conclusion, ""]
    page += [f"- {name}: {' / '.join(text.splitlines())}" for name, text in facts.items()]
    page += ["", "| check | ranks | verdict | s | found |", "|---|---|---|---|---|"]
    for row in rows:
        text = row["text"].replace("|", r"\|")
        page.append(
            f"| {row['name']} | {row['ranks'] or '-'} | {row['verdict']} | {row['seconds']:.0f} | {text} |"
        )
    (folder / "report.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    values = {"device": device, "facts": facts, "results": rows}
    (folder / "results.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(f"{conclusion}\nReport: {folder / 'report.md'}")
    return bool(rows) and not counts[FAILED]
