"""Generates docs/files.md: each file of the program with the first sentences of its description."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.reference.source_trees import parsed

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("llm_serving", "agent", "performance", "tools", "deploy", "helm", "tests/support")
"""The folders whose files are listed."""
SUFFIXES = (".py", ".cc", ".h", ".js", ".css", ".yaml")
MIN_CHARS, MAX_CHARS = 60, 240
"""Minimum and maximum length of a file's description in the page, in characters."""
MAX_NAMES = 6
"""Maximum number of names that the page shows for a file. Limits and times are always shown, even if there are more."""
_LIMIT = re.compile(r"_?(MAX|MIN|DEFAULT)_.*|.*_(S|MS|BYTES)")
"""Names of limits and times. A change is often about one of them."""
INTRODUCTION = """\
# All files

For developers who found no row in [where to change what](where_to_change.md). Search this page for a word of your
change. If you find none, try another word of the [glossary](glossary.md). [Fixed numbers](constants.md) has the values
of limits and times, with their meaning.

<!-- Written by tools/write_reference_docs.py from the first sentences of each file. Edit there. -->

Each row has a file, its task, and names in it: all limits and times, and some other constants and classes. A name that
begins with `MAX` is a limit. A name that ends with `_S` or `_MS` is a time in seconds or milliseconds. The tests of
`llm_serving/NAME/` are in `tests/NAME/`, and those of `agent/` in `tests/agent/` and `tests/kernels/`.
"""


def files_page() -> str:
    """Returns the page docs/files.md."""
    folders: dict[str, list[Path]] = {}
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SUFFIXES and path.name != "__init__.py" and "vendor" not in path.parts:
                folders.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return INTRODUCTION + "".join(_section(folder, folders[folder]) for folder in sorted(folders))


def _section(folder: str, paths: list[Path]) -> str:
    package = ROOT / folder / "__init__.py"
    about = _sentence(_description(package, package.read_text(encoding="utf-8"))) if package.is_file() else ""
    rows = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        names = ", ".join(f"`{name}`" for name in _shown(list(dict.fromkeys(_names(path, text)))))
        rows.append(f"| `{path.name}` | {_sentence(_description(path, text))} | {names} |\n")
    lines = "".join(f"{line}\n" for line in textwrap.wrap(about, 120))
    table = "| file | task | names |\n|---|---|---|\n" + "".join(rows)
    return f"\n## `{folder}`\n\n{lines}\n{table}" if lines else f"\n## `{folder}`\n\n{table}"


def _description(path: Path, text: str) -> str:
    """Returns the docstring of a module, or the first comment of another file.

    A C++ file without a comment implements its header, and has the header's description. A YAML file without a comment
    has the value of its key ``kind`` or ``description``.
    """
    if path.suffix == ".py":
        return ast.get_docstring(parsed(text)) or ""
    if path.suffix in (".js", ".css") and (comment := re.match(r"\s*/\*+(.*?)\*/", text, re.DOTALL)):
        return re.sub(r"(?m)^\s*\*", "", comment[1])
    mark = r"(?:#|\{\{-?\s*/\*)" if path.suffix == ".yaml" else "//"
    lines = re.match(rf"(?:\s*\{{\{{[^}}]*\}}\}}\n)?((?:[ \t]*{mark}[^\n]*\n)+)", text)
    if lines is not None:
        return re.sub(rf"(?m)^\s*{mark}+ ?|\s*\*/\s*-?\}}\}}$", "", lines[1])
    if path.suffix == ".cc" and (header := path.with_suffix(".h")).is_file():
        return f"Implements `{header.name}`. {_description(header, header.read_text(encoding='utf-8'))}"
    kind = re.search(r"(?m)^(?:kind|description): (.*)$", text)
    return kind[1] if kind is not None and path.suffix == ".yaml" else ""


def _sentence(description: str) -> str:
    """Returns the beginning of a description on one line, for a cell of a table: at least ``MIN_CHARS`` characters."""
    paragraph = description.strip().partition("\n\n")[0].partition("\n ")[0]
    chosen = paragraph if len(paragraph) >= MIN_CHARS else description
    text = " ".join(chosen.split()).replace("``", "`").replace("|", r"\|")
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)
    shown = sentences.pop(0)
    while sentences and len(shown) < MIN_CHARS:
        shown += f" {sentences.pop(0)}"
    return shown if len(shown) <= MAX_CHARS else f"{shown[:MAX_CHARS].rpartition(' ')[0]} ..."


def _shown(names: list[str]) -> list[str]:
    """Returns those of a file's ``names`` that the page shows: all limits and times, then other names.

    Other names are left out if there are more than ``MAX_NAMES`` names.
    """
    limits = [name for name in names if _LIMIT.fullmatch(name)]
    others = [name for name in names if not _LIMIT.fullmatch(name)]
    return limits + others[: max(0, MAX_NAMES - len(limits))]


def _names(path: Path, text: str) -> Iterator[str]:
    """Yields the names of a file that a change may be about: constants first, then public classes."""
    if path.suffix == ".py":
        body = parsed(text).body
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]+", each.id):
                        yield each.id
        yield from (node.name for node in body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        return
    if path.suffix == ".js":
        yield from re.findall(r"^(?:export )?const ([A-Z][A-Z0-9_]+)", text, re.MULTILINE)
    if path.suffix in (".cc", ".h"):
        for line in re.findall(r"^(?:static )?constexpr .*", text, re.MULTILINE):
            yield from re.findall(r"\b(k[A-Z]\w+)(?:\[\w*\])? = ", line)
