"""The site's own rules: pages from outside ``docs/``, links to other files of the repository, Sphinx markup in docstrings."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "examples/README.md": "examples.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>[~.]*")


def on_files(files, config, **_):
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, **_):
    """Links that are right in the repository become right on the site; those to files that it has not become their text."""
    sources = {page: name for name, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(match):
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            return match[0]
        if path not in PAGES and not path.startswith("docs/"):
            return text
        place = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''})"

    return LINK.sub(link, markdown)


def on_page_content(html, **_):
    return ROLE.sub("<code>", html).replace("::</p>", ":</p>")
