"""Searches the syntax trees of the project's own source for calls and imports, by their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.reference.source_trees import parsed
from tools.reliability.registry import REPOSITORY


def calls(package: str, names: set[str]) -> Iterator[str]:
    """Yields ``file:line name`` of each call of one of the dotted ``names`` in a package."""
    last = {name.rpartition(".")[2] for name in names}
    for path, tree in _trees(package, last):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or _last_name(node.func) not in last:
                continue
            if (name := ast.unparse(node.func)) in names:
                yield f"{path}:{node.lineno} {name}"


def _last_name(called: ast.expr) -> str | None:
    """Returns the last part of a dotted name, or None. Comparing it is a fast filter before the slow ``ast.unparse``.
    """
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else None


def imports(package: str, modules: set[str]) -> Iterator[str]:
    """Yields ``file:line module`` of each import of one of the ``modules`` in a package."""
    for path, tree in _trees(package, modules):
        for node in ast.walk(tree):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in found:
                if name.partition(".")[0] in modules:
                    yield f"{path}:{node.lineno} {name}"


def keywords(package: str, keyword: str, value: object) -> Iterator[str]:
    """Yields ``file:line`` of each call with the argument ``keyword=value`` in a package."""
    for path, tree in _trees(package, {keyword}):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for each in node.keywords:
                    if each.arg == keyword and isinstance(each.value, ast.Constant) and each.value.value == value:
                        yield f"{path}:{node.lineno} {keyword}={value}"


def _trees(package: str, words: set[str]) -> Iterator[tuple[Path, ast.Module]]:
    """Yields the syntax tree of each file that contains one of the words. Parsing all files would take seconds."""
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path.relative_to(REPOSITORY), parsed(text)
