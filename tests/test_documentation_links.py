"""Tests that every link of the documentation leads to an existing file and heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.small_configs import REPOSITORY

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors_of(page: Path) -> set[str]:
    """Returns the link targets that a renderer makes of the headings of a page.

    They are in lower case, without punctuation, and with hyphens instead of spaces.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def broken_links(page: Path) -> Iterator[str]:
    """Yields the links of a page whose file or heading does not exist."""
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors_of(target.resolve()):
            yield f"{link}: no such heading"


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 40
    assert {page.name: broken for page in PAGES if (broken := list(broken_links(page)))} == {}


def test_every_page_is_listed_in_the_index() -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text()
    assert [page.name for page in (REPOSITORY / "docs").glob("*.md") if f"({page.name})" not in index] == ["index.md"]
    lab = (REPOSITORY / "docs" / "lab" / "README.md").read_text()
    assert [p.name for p in (REPOSITORY / "docs" / "lab").glob("*.md") if f"({p.name})" not in lab] == ["README.md"]


def test_a_page_says_first_for_whom_it_is() -> None:
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    first = {page.name: next(line for line in page.read_text().splitlines()[1:] if line) for page in pages}
    assert len(first) > 30
    assert {page: line for page, line in first.items() if not line.startswith("For ")} == {}, "who should read it?"


def test_lines_of_prose_are_not_too_long() -> None:
    pages = [page for page in PAGES if page.parent.name != "lab"]
    assert {page.name: lines for page in pages if (lines := long_lines(page.read_text()))} == {}


def long_lines(text: str) -> list[str]:
    """Returns the lines of prose with more than 120 columns. Tables, code and generated pages may have longer lines."""
    if "Written by tools/" in text:
        return []
    text = re.sub(r"^ *```.*?^ *```", "", re.sub(r"https?://\S+", "", text), flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "![")) and line[:4] != "    "]
    return [line for line in prose if len(line) > 120]


def test_a_long_line_is_found() -> None:
    long = "word " * 25
    assert long_lines(f"# Title\n\n{long}\n\n| {long} |\n\n```\n{long}\n```\n") == [long]


def test_readme_and_performance_page_are_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 110
    assert len((REPOSITORY / "docs" / "performance.md").read_text().splitlines()) <= 130


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading, and no more\n[a](#one-heading-and-no-more) [b](#another) [c](gone.md) `[d](x)`\n")
    assert list(broken_links(page)) == ["#another: no such heading", "gone.md: no such file"]
