"""The documentation names modules, commands and flags that exist, and the reference has an entry for each public name; the picture
of the rooms shows the imports of the code as they are, and the quick run has something of every room."""

from __future__ import annotations

import ast
import pkgutil
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import hvd_ckpt
from benchmarks.__main__ import benchmarks
from hvd_ckpt.app.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
TEXTS = {page: page.read_text(encoding="utf-8") for page in (*PAGES, *ROOT.glob("docs/**/*.md"))}
of_each_page = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


def code(text: str) -> str:
    """Fenced and inline code, a line each; comments and quoted arguments left out."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = "\n".join([*fenced, *inline]).replace("\\\n", " ")
    return re.sub(r"\"[^\"\n]*\"|'[^'\n]*'|\s#[^\n]*", "", lines)


@of_each_page
def test_modules_exist(page: Path) -> None:
    for name in set(re.findall(r"\bhvd_ckpt(?:\.[A-Za-z_]\w*)+", TEXTS[page])):
        pkgutil.resolve_name(name)


def commands(
    group: click.Group, words: str, context: click.Context | None = None
) -> Iterator[tuple[str, set[str]]]:
    """Each command by its words, and its flags."""
    context = click.Context(group, parent=context)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{words} {name}", {flag for one in command.params for flag in [*one.opts, *one.secondary_opts]}
        if isinstance(command, click.Group):
            yield from commands(command, f"{words} {name}", context)


def test_commands_and_flags_exist() -> None:
    known = {**dict(commands(main, "hvd-ckpt")), **dict(commands(benchmarks, "python -m benchmarks"))}
    named = r"((?:hvd-ckpt|python -m benchmarks) [a-z][a-z_-]*)([^\n|&]*)"
    for page, text in TEXTS.items():
        for words, rest in re.findall(named, code(text)):
            assert words in known, f"{page}: {words}"
            for flag in re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest):
                assert flag in known[words] | {"--help"}, f"{page}: {words} {flag}"


def test_linked_tests_exist() -> None:
    """The site shows such a link as its text, and mkdocs does not look for the file."""
    for page, text in TEXTS.items():
        for words, target in re.findall(r"\[([^\]]*)\]\(((?:\.\./)*tests/[^)]+)\)", text):
            source = (page.parent / target).read_text(encoding="utf-8")
            for name in re.findall(r"`(test_\w+)`", words):
                assert f"def {name}(" in source, f"{page}: {name}"


def anchors(page: Path) -> set[str]:
    """Those of the headings of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in headings}


@of_each_page
def test_links_lead_somewhere_in_the_repository(page: Path) -> None:
    """mkdocs compares them with the pages of the site, which has some more."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[page], flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_public_name_has_an_entry() -> None:
    documented = set(re.findall(r"`(\w+)`", TEXTS[API / "horovod.md"]))
    for page in API.glob("*.md"):
        documented.update(re.findall(r"^::: [\w.]+\.(\w+)$", TEXTS[page], re.MULTILINE))
    assert sorted(set(hvd_ckpt.__all__) - documented) == []
    index = set(re.findall(r"`(\w+)`", TEXTS[API / "index.md"]))
    assert index - {"hvd_ckpt"} <= set(hvd_ckpt.__all__)


# ------------------------------------------------------------------------------------ rooms


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["draw"]()
    assert (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8") == drawn, "run python docs/draw_rooms.py"


CORE = ("distributed", "sharding", "planning", "reduction", "recompute", "batchnorm", "data", "utils")


@pytest.mark.parametrize("room", CORE)
def test_the_core_reads_no_stages_and_parts(room: str) -> None:
    """It asks :mod:`hvd_ckpt.processes.whole_model`, and :mod:`hvd_ckpt.processes.grid` for values of all processes."""
    places = {"stage", "stages", "part", "tensor", "process", "peers", "link", "stage_link", "part_link"}
    for file in (ROOT / "hvd_ckpt" / room).rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        grids = {"current()", "grid()", "grid", "self._grid"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in places:
                assert ast.unparse(node.value) not in grids, f"{file}:{node.lineno}"


def test_the_quick_run_has_something_of_every_room() -> None:
    tests = ROOT / "tests"
    chosen = [ROOT / line.split("::")[0] for line in (tests / "quick.txt").read_text("utf-8").split()]
    assert all(file.is_file() for file in chosen)
    assert {file.parent for file in tests.rglob("test_*.py")} == {file.parent for file in chosen}
