"""Tests that docs/constants.md has every number that a developer may want to change, with its meaning."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from support.small_configs import REPOSITORY
from tools.reference.constants import FOLDERS, UNITS, constants, cpp_constants, cpp_number, python_constants
from tools.reference.number_values import readable

PYTHON_NUMBER = re.compile(r"(_?[A-Z][A-Z0-9_]+)(?:: \w+)? = (\d[\d_.() */+<e-]*)\s*(?:#.*)?")
CPP_NUMBER = re.compile(r"(?:static |inline )?constexpr \w+ (k\w+) = (\d+);.*")


def rows() -> dict[tuple[str, str], list[str]]:
    """Returns meaning and value of each row of the page, by folder and file, and by name."""
    found, folder = {}, ""
    for line in (REPOSITORY / "docs" / "constants.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            folder = line[4:-1]
        elif line.startswith("| ") and not line.startswith("| meaning"):
            *texts, name, file = line.strip("| ").rsplit(" | ", 3)
            found[f"{folder}/{file.split('`')[1]}", name.strip("`")] = texts
    return found


def test_no_number_of_the_source_is_missed() -> None:
    found = rows()
    missed, num_seen = [], 0
    for top in FOLDERS:
        for path in (REPOSITORY / top).rglob("*.py"):
            place, lines = path.relative_to(REPOSITORY).as_posix(), path.read_text("utf-8").splitlines()
            for line, after in pairwise([*lines, ""]):
                match = PYTHON_NUMBER.fullmatch(line)
                if match is None or (match[1].startswith("_") and not after.startswith('"""')) or match[1] in UNITS:
                    continue
                num_seen += 1
                missed += [] if (place, match[1]) in found or match[2][:2] in ("0x", "0o") else [(place, match[1])]
    assert num_seen > 600
    assert missed == []


def test_no_number_of_the_kernels_is_missed() -> None:
    found = rows()
    numbers = [
        (path.relative_to(REPOSITORY).as_posix(), match[1])
        for path in sorted((REPOSITORY / "agent/kernels").rglob("*"))
        if path.suffix in (".h", ".cc")
        for match in map(CPP_NUMBER.fullmatch, path.read_text("utf-8").splitlines())
        if match is not None
    ]
    assert len(numbers) > 60
    assert [number for number in numbers if number not in found] == []


def test_every_constant_of_python_has_a_text() -> None:
    bare = [(place, name) for (place, name), (text, _) in rows().items() if place.endswith(".py") and text[0] == "*"]
    assert bare == [], "add a docstring that states what the number limits or sets"


def test_every_constant_has_a_row() -> None:
    listed = {(constant.path.relative_to(REPOSITORY).as_posix(), constant.name) for constant in constants()}
    assert listed == set(rows())


def test_the_page_shows_values_as_the_source_has_them() -> None:
    text, value = rows()["llm_serving/server/limits.py", "KEEP_ALIVE_S"]
    assert text == "Maximum seconds that a connection may stay open without a request."
    assert value == "`75.0` (75 s)"
    assert rows()["llm_serving/server/limits.py", "MESSAGE_TIMEOUT_S"][1] == "`BODY_TIMEOUT_S + 5.0` (35 s)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('WAIT_S = 3.0\n"""Seconds. More."""', [("WAIT_S", "3.0", 3.0, "Seconds. More.")]),
        ("ONE = 2  # the number", [("ONE", "2", 2, "the number")]),
        ("# The number\n# of rows.\nONE: int = 2 * 8", [("ONE", "2 * 8", 16, "The number\nof rows.")]),
        ('ONE, TWO = 4, 8\n"""Two."""', [("ONE", "4", 4, "Two."), ("TWO", "8", 8, "Two.")]),
        ("ONE = 1 << 4\nBYTES = 3 * ONE", [("ONE", "1 << 4", 16, ""), ("BYTES", "3 * ONE", 48, "")]),
        ("from llm_serving.server.limits import MAX_CHOICES\nONE = MAX_CHOICES", [("ONE", "MAX_CHOICES", 64, "")]),
        ("ONE, TWO, THREE = 0, 1, 2", []),
        ('ONE, TWO = 0, 1\n"""Two."""', [("ONE", "0", 0, "Two."), ("TWO", "1", 1, "Two.")]),
        ('_SIDE = 3\n_EDGE = 4\n"""Four."""', [("_EDGE", "4", 4, "Four.")]),
        ('ONE = 0x10\nTWO = -1\nTHREE = True\nFOUR = "4"\nFIVE = int(x)\nlower = 3\nGIB = 1024', []),
        ('ONE = float("inf")', [("ONE", 'float("inf")', float("inf"), "")]),
    ],
)
def test_python_numbers(lines: str, expected: list[tuple[str, str, float, str]], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(lines)
    assert [(each.name, each.source, each.value, each.text) for each in python_constants(path)] == expected


def test_cpp_numbers(tmp_path: Path) -> None:
    path = tmp_path / "kernel.h"
    path.write_text(
        "// Rows of a tile.\nconstexpr int64_t kRows = 16;\nconstexpr int64_t kBytes = int64_t{64} << 20;  // bytes\n"
        "constexpr float kLimit = 2.5f;\nconstexpr int kOther = kRows / 2;\nstatic constexpr Keys kKeys;\n"
        "constexpr uint64_t kMask = 0xFFu;\n"
    )
    found = [(each.name, each.value, each.text) for each in cpp_constants(path)]
    assert found == [("kRows", 16, "Rows of a tile."), ("kBytes", 64 << 20, "bytes"), ("kLimit", 2.5, "")]
    assert cpp_number("20'000'000") == 20_000_000
    assert cpp_number("std::numeric_limits<float>::lowest()") is None


@pytest.mark.parametrize(
    ("name", "source", "value", "text", "form"),
    [
        ("PIECE_BYTES", "512 * 1024", 512 * 1024, "", "512 KiB"),
        ("MAX_BYTES", "1000", 1000, "", "1000 bytes"),
        ("TIMEOUT_S", "30.0", 30.0, "", "30 s"),
        ("MAX_DRAIN_S", "86400.0", 86400.0, "", "86,400 s = 1 day"),
        ("POLL_S", "0.02", 0.02, "", "0.02 s = 20 ms"),
        ("LINGER_MS", "200", 200, "", "200 ms"),
        ("MAX_MILLISECONDS", "24 * 3600 * 1000", 86_400_000, "", "86,400,000 ms = 1 day"),
        ("kSleepNanoseconds", "20'000'000", 20_000_000, "", "20,000,000 ns = 20 ms"),
        ("MAX_CHARS", "80", 80, "", "80 characters"),
        ("kAhead", "8 << 10", 8 << 10, "bytes that are prefetched", "8 KiB"),
        ("ERROR", "1e-12", 1e-12, "", ""),
        ("PERIOD", "5", 5, "Seconds between two looks.", "5 s"),
        ("RATE", "5", 5, "Maximum tokens of a request.", ""),
        ("LIMIT", "2**31 - 1", 2**31 - 1, "", "2,147,483,647"),
        ("FACTOR", "1.5", 1.5, "", ""),
    ],
)
def test_readable_forms(name: str, source: str, value: float, text: str, form: str) -> None:
    assert readable(name, source, value, text) == form
