"""Adds CONTRIBUTING.md and CHANGELOG.md, which are not in docs/, to the documentation site (hooks of mkdocs)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds CONTRIBUTING.md and CHANGELOG.md to the pages, and changes their links to docs/ to links within the site."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=_site_links(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes links to CONTRIBUTING.md and CHANGELOG.md in a page so that they lead to the pages of the site."""
    return _site_links(markdown)


def _site_links(text: str) -> str:
    return re.sub(r"\]\((?:\.\./)*(CONTRIBUTING|CHANGELOG)\.md", lambda match: f"]({PAGES[match[1] + '.md']}", text)
