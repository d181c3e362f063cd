"""Tests the documentation site. Every page is in its menu, and it loads no file from other hosts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.small_configs import REPOSITORY

EXTERNAL = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:|//)", re.IGNORECASE)


def menu_pages(entries: Any) -> set[str]:
    """Returns the pages of a menu and of its submenus."""
    if isinstance(entries, str):
        return {entries}
    values = entries.values() if isinstance(entries, dict) else entries
    return {page for entry in values for page in menu_pages(entry)}


def test_every_page_is_in_the_menu() -> None:
    menu = menu_pages(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    docs = REPOSITORY / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert menu == pages | {"contributing.md", "changelog.md"}


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="make docs-site installs mkdocs-material")
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if EXTERNAL.search(page.read_text("utf-8"))] == []
