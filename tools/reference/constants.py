"""Generates docs/constants.md: every constant of the program that is a plain number, with its meaning and value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tools.reference.number_values import NAME, number, readable
from tools.reference.source_trees import parsed

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("agent", "llm_serving", "performance", "tools")
"""The folders whose constants are listed."""
UNITS = ("KIB", "MIB", "GIB", "GIGA", "MICROSECOND")
"""Constants that are units. They never change."""
INTRODUCTION = """\
# Fixed numbers

For developers who want to change a number that is no setting: a time, a limit, a size. Search this page for a word of
its meaning, or for the number, for example `30 s` or `512 KiB`. [Configuration](configuration.md) has the settings.

<!-- Written by tools/write_reference_docs.py from the constants and the texts next to them. Edit there. -->

If a constant of a kernel has no text of its own, the meaning is the task of its file, in italics. The value is as in
the source. Behind it is the same number in a readable form. The page leaves out units (`GIB`) and private constants of
Python without a text. It also leaves out numbers without a text that only distinguish kinds (0, 1, 2) or are patterns
of bits (`0x7F`, -1).
"""
_CONSTEXPR = re.compile(r"^(?:inline |static )*constexpr [\w:]+ (k[A-Z]\w*) = ([^;]+);[ \t]*(?://[ \t]*(.*))?$")
_CPP_TYPE = re.compile(r"(?:u?int\d*_t|int|float|double|size_t)\s*\{\s*(\d+)\s*\}")
_CPP_SUFFIX = re.compile(r"\b((?:0x[0-9A-Fa-f]+)|(?:\d[\d.]*(?:e[-+]?\d+)?))(?:[uUlL]+|f)\b")


@dataclass(frozen=True)
class Constant:
    """A constant of a source file."""

    path: Path
    name: str
    source: str
    """The value as the source has it."""
    value: float
    text: str
    """The docstring or comment next to the constant; empty if there is none."""


def constants_page() -> str:
    """Returns the page docs/constants.md."""
    sections: dict[str, list[str]] = {}
    for constant in constants():
        sections.setdefault(constant.path.parent.relative_to(ROOT).as_posix(), []).append(_row(constant))
    table = "| meaning | value | name | file |\n|---|---|---|---|\n"
    return INTRODUCTION + "".join(f"\n## `{name}`\n\n{table}{''.join(rows)}" for name, rows in sorted(sections.items()))


def constants() -> Iterator[Constant]:
    """Yields the constants of all files that are plain numbers."""
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix == ".py":
                yield from python_constants(path)
            elif path.suffix in (".cc", ".h") and "vendor" not in path.parts:
                yield from cpp_constants(path)


def _row(constant: Constant) -> str:
    text = _sentence(constant.text) or f"*{_task(constant.path)}*"
    form = readable(constant.name, constant.source, constant.value, constant.text)
    value = f"`{constant.source}`".replace("|", r"\|") + (f" ({form})" if form else "")
    folder = constant.path.parent.relative_to(ROOT).as_posix()
    link = f"[`{constant.path.name}`](files.md#{folder.replace('/', '')})"
    return f"| {text} | {value} | `{constant.name}` | {link} |\n"


def _sentence(text: str) -> str:
    """Returns the first sentence of a text on one line, for a cell of a table."""
    line = " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", r"\|")
    return re.split(r"(?<=\.) (?=[A-Z`])", line)[0]


@cache
def _task(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return _sentence(ast.get_docstring(parsed(text)) or "")
    comment = re.match(r"(?:[ \t]*//[^\n]*\n)+", text)
    header = path.with_suffix(".h")
    if comment is None and path.suffix == ".cc" and header.is_file():
        return _task(header)
    return _sentence(re.sub(r"(?m)^\s*//+ ?", "", comment[0])) if comment is not None else ""


def python_constants(path: Path) -> Iterator[Constant]:
    """Yields the numbers of a Python module. A tuple of assignments gives one constant for each name."""
    text = path.read_text("utf-8")
    body, lines, known = parsed(text).body, text.splitlines(), values_of(path)
    for node, after in pairwise([*body, None]):
        assert node is not None
        pairs = [(name, value) for name, value in assignments(node) if name in known]
        own = _text_of(node, after, lines)
        if not own and _are_kinds([known[name] for name, _ in pairs]):
            continue
        for name, value in pairs:
            source = _source_of(value, text, lines)
            if own or not (name.startswith("_") or name in UNITS or _is_pattern(source)):
                yield Constant(path, name, source, known[name], own)


def _source_of(value: ast.expr, text: str, lines: list[str]) -> str:
    """Returns the source of an expression. ``ast.get_source_segment`` splits the whole text, so it is slower."""
    if value.lineno == value.end_lineno:
        return lines[value.lineno - 1].encode()[value.col_offset : value.end_col_offset].decode()
    return ast.get_source_segment(text, value) or ""


def assignments(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Returns the constants that a statement of a module assigns, with their expressions."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return []
    pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    return [(name.id, each) for name, each in pairs if isinstance(name, ast.Name) and NAME.fullmatch(name.id)]


def _are_kinds(values: list[float]) -> bool:
    """Returns True if one statement numbers several kinds: the values are consecutive integers."""
    return len(values) > 1 and all(later - earlier == 1 for earlier, later in pairwise(values))


def _is_pattern(source: str) -> bool:
    """Returns True if a number is a pattern of bits or a mark: the source writes it in base 8 or 16, or it is -1."""
    return re.match(r"0[xXoO]|-1$", source) is not None


@cache
def values_of(path: Path) -> dict[str, float]:
    """Returns the constants of a Python module that are numbers, with their values.

    An expression may use other constants of the module, and imported ones.
    """
    body = parsed(path.read_text("utf-8")).body
    known: dict[str, float] = {}
    imported: dict[str, float] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and any(NAME.fullmatch(each.name) for each in node.names):
            source = ROOT / f"{node.module.replace('.', '/')}.py"
            others = values_of(source) if source.is_file() else {}
            imported |= {each.asname or each.name: others[each.name] for each in node.names if each.name in others}
        for name, expression in assignments(node):
            value = number(expression, imported | known)
            if value is not None:
                known[name] = value
    return known


def _text_of(node: ast.stmt, after: ast.stmt | None, lines: list[str]) -> str:
    """Returns the docstring after a constant, or else the comment behind it, or else the comment before it."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return after.value.value
    _, mark, behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
    if mark and not behind.startswith(("noqa", "type:", "fmt:")):
        return behind
    return _comment_before(lines, node.lineno - 1, "#")


def _comment_before(lines: list[str], index: int, mark: str) -> str:
    """Returns the lines of a comment that end directly before a line."""
    first = index
    while first > 0 and lines[first - 1].startswith(mark):
        first -= 1
    return "\n".join(line.lstrip(f"{mark} ") for line in lines[first:index])


def cpp_constants(path: Path) -> Iterator[Constant]:
    """Yields the constants of a C++ file whose values are literal numbers, simple arithmetic included."""
    lines = path.read_text("utf-8").splitlines()
    for index, line in enumerate(lines):
        found = _CONSTEXPR.match(line)
        if found is None:
            continue
        name, source, behind = found[1], found[2], found[3]
        value = cpp_number(source)
        if value is not None:
            text = _comment_before(lines, index, "//") or behind or ""
            if text or not _is_pattern(source):
                yield Constant(path, name, source, value, text)


def cpp_number(source: str) -> float | None:
    """Returns the value of a C++ expression of literal numbers, or None for another expression."""
    plain = _CPP_SUFFIX.sub(r"\1", _CPP_TYPE.sub(r"\1", source)).replace("'", "_")
    try:
        expression = ast.parse(plain.strip(), mode="eval").body
    except SyntaxError:
        return None
    return number(expression, {})
