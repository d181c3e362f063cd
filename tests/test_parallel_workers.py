"""Tests that the processes of pytest-xdist report each problem, and that files whose import fails are imported again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.parallel_workers import LONG_S, IndexedNames, import_early, needed_reports


def reports(setup: str, call: str | None, teardown: str, seconds: float = 0.0) -> list[pytest.TestReport]:
    """Returns the reports of a test with these outcomes. ``seconds`` is the duration of its set-up and its removal."""
    place = ("test_it.py", 1, "test_it")
    outcomes = [("setup", setup, seconds), ("call", call, 0.0), ("teardown", teardown, seconds)]
    return [
        pytest.TestReport("test_it", place, {}, outcome, None, when, duration=duration)  # type: ignore[arg-type]
        for when, outcome, duration in outcomes
        if outcome
    ]


@pytest.mark.parametrize(
    ("outcomes", "sent"),
    [
        (("passed", "passed", "passed"), ["call"]),
        (("passed", "passed", "passed", LONG_S), ["setup", "call", "teardown"]),
        (("passed", "failed", "passed"), ["setup", "call", "teardown"]),
        (("passed", "skipped", "passed"), ["setup", "call", "teardown"]),
        (("passed", "passed", "failed"), ["setup", "call", "teardown"]),
        (("failed", None, "passed"), ["setup", "teardown"]),
        (("skipped", None, "passed"), ["setup", "teardown"]),
    ],
)
def test_only_a_test_that_passes_quickly_has_a_single_report(outcomes: tuple[str, ...], sent: list[str]) -> None:
    assert [report.when for report in needed_reports(reports(*outcomes))] == sent  # type: ignore[arg-type]


def test_an_indexed_list_finds_its_names() -> None:
    names = IndexedNames(["b", "a", "c"])
    assert names == ["b", "a", "c"]
    assert [names.index(name) for name in names] == [0, 1, 2]


def test_files_are_imported_early_from_the_last_one_and_failed_ones_are_forgotten(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(sys, "order_of_early_imports", order, raising=False)
    for folder in ("a", "b", "other"):
        (tmp_path / folder).mkdir()
        for name in ("fine", "skipped", "wrong"):
            file = tmp_path / folder / f"test_early_{name}.py"
            file.write_text(f"import sys\nimport pytest\nsys.order_of_early_imports.append('{folder} {name}')\n")
    for name, line in {"skipped": "pytest.skip('it', allow_module_level=True)\n", "wrong": "1 / 0\n"}.items():
        with (tmp_path / "b" / f"test_early_{name}.py").open("a") as file:
            file.write(line)
    (tmp_path / "other/pytest.ini").write_text("[pytest]\n")
    before = set(sys.modules)
    try:
        import_early(pytestconfig, tmp_path)
        files = {getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert order == [f"{folder} {name}" for folder in ("b", "a") for name in ("wrong", "skipped", "fine")]
    kept = {str(tmp_path / "a" / f"test_early_{name}.py") for name in ("fine", "skipped", "wrong")}
    assert {file for file in files if file} == kept | {str(tmp_path / "b/test_early_fine.py")}
