"""The site's own rules: pages from outside ``docs/`` and the commands' help, links to other files, Sphinx markup in docstrings."""

import posixpath
import re
import sys
from pathlib import Path

import click
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
RULES = "hvd_ckpt/utils/rules.py"  # its table is a page of the site
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>[~.]*")


def on_files(files, config, **_):
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        wide = "---\nhide: [navigation, toc]\n---\n" if page == "index.md" else ""
        files.append(File.generated(config, page, content=wide + text))
    sys.path.insert(0, str(ROOT))
    from hvd_ckpt.app.cli.main import main

    helps = "\n".join(command_help(main, click.Context(main, info_name="hvd-ckpt", terminal_width=100)))
    files.append(File.generated(config, "commands.md", content=f"# Commands\n\n{helps}"))
    files.append(File.generated(config, "combinations.md", content=combinations()))
    return files


def combinations():
    """A page of the rules of what goes with what."""
    from hvd_ckpt.utils.rules import RULES, in_words

    apart = (rule for rule in RULES if not rule.needs)
    needed = (rule for rule in RULES if rule.needs)
    lines = ["# Combinations", "", "Everything that is not named here can be combined. The rest is one error, on every rank."]
    for title, rules in (("cannot be used with", apart), ("needs", needed)):
        lines += ["", f"| setting, argument or feature | {title} | reason | way out |", "|---|---|---|---|"]
        lines += [
            f"| {in_words(rule.feature)} | {in_words(rule.other)} | {rule.reason} | {rule.way_out} |"
            for rule in rules
        ]
    return "\n".join(lines) + "\n"


def command_help(command, context):
    """A section for a command and each of its own commands, with the text of ``--help``."""
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            yield from command_help(inner, click.Context(inner, context, name, terminal_width=100))


def on_page_markdown(markdown, page, **_):
    """Links that are right in the repository become right on the site; those to files that it has not become their text."""
    sources = {page: name for name, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    places = {**PAGES, RULES: "combinations.md"}

    def link(match):
        image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            return match[0]
        if path not in places and not path.startswith("docs/"):
            return text
        place = places.get(path, path.removeprefix("docs/"))
        return (
            f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''})"
        )

    return LINK.sub(link, markdown)


def on_page_content(html, **_):
    return ROLE.sub("<code>", html).replace("::</p>", ":</p>")
