"""Hooks of mkdocs: CONTRIBUTING.md and CHANGELOG.md, which are not in docs/, become pages of the site too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, with their links as seen from docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=_site_links(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links to the added pages lead to the site."""
    return _site_links(markdown)


def _site_links(text: str) -> str:
    return re.sub(r"\]\((?:\.\./)*(CONTRIBUTING|CHANGELOG)\.md", lambda match: f"]({PAGES[match[1] + '.md']}", text)
