"""Tests the selection of kernel tests that run in qemu."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.case_samples import check_names, check_sample, cover, read_intervals, repetitions_of, select_cases
from tools.check_aarch64 import INSTRUCTION_SETS, ONCE, SAMPLED, repetitions, selection

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
TEST = "tests/kernels/test_a.py::test_equals"


def cases(**parameters: int) -> list[Any]:
    """Returns the test cases of a function with two parameters. Each argument is a parameter's number of values. The
    last one varies fastest.
    """
    (outer, outers), (inner, inners) = parameters.items()
    return [
        SimpleNamespace(nodeid=f"{TEST}[{i}-{j}]", callspec=SimpleNamespace(params={outer: i, inner: j}))
        for i in range(outers)
        for j in range(inners)
    ]


def test_a_sample_rotates_through_the_values_of_all_parameters() -> None:
    items = [*cases(shape=5, dtype=6), SimpleNamespace(nodeid="tests/kernels/test_b.py::test_other")]
    chosen = select_cases(items, 1, {TEST: 5})
    assert [item.nodeid.partition("[")[2][:-1] for item in chosen[:-1]] == ["0-0", "0-5", "1-4", "2-3", "3-2", "4-1"]
    assert chosen[-1] is items[-1], "a function without an interval keeps all cases"
    check_sample(items, chosen, {TEST: 5})


def test_a_sample_that_leaves_out_a_value_is_refused() -> None:
    items = cases(shape=5, dtype=6)
    with pytest.raises(pytest.UsageError, match=r"test_equals=3 leaves out dtype 1, dtype 2, dtype 4, dtype 5"):
        check_sample(items, select_cases(items, 1, {TEST: 3}), {TEST: 3})


def test_a_cover_has_all_values_with_few_cases() -> None:
    items = cases(shape=3, dtype=5)
    chosen = select_cases(items, 1, read_intervals([f"{TEST}=cover"]))
    assert [item.nodeid.partition("[")[2][:-1] for item in chosen] == ["0-0", "0-3", "1-1", "1-4", "2-2"]
    check_sample(items, chosen, {TEST: 0})


def test_each_value_occurs_as_often_as_the_cover_says_or_in_all_its_cases() -> None:
    items = cases(shape=2, dtype=5)
    chosen = cover(items, 3)
    assert len(chosen) == 10, "each type occurs in two cases only"
    items = cases(shape=5, dtype=6)
    chosen = cover(items, 2)
    assert len(chosen) == 12
    for name, number in (("shape", 5), ("dtype", 6)):
        values = [item.callspec.params[name] for item in chosen]
        assert all(values.count(value) >= 2 for value in range(number))
    left_out = repetitions_of([*items, SimpleNamespace(nodeid="tests/kernels/test_b.py::test_other")], [TEST], 2)
    assert sorted(item.nodeid for item in (*left_out, *chosen)) == sorted(item.nodeid for item in items)


def test_an_entry_of_a_list_that_selects_no_case_is_refused(tmp_path: Path) -> None:
    file, _, _ = TEST.partition("::")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    items = cases(shape=2, dtype=2)
    check_names(items, tmp_path, [f"{TEST}[1-", TEST])
    check_names([], tmp_path, [f"{TEST}[2-"])  # another run collects the file
    for dead in (f"{TEST}[2-", f"{file}::test_other", "tests/test_c.py::test_d"):
        with pytest.raises(pytest.UsageError, match=re.escape(f"that select no case: {dead}")):
            check_names(items, tmp_path, [TEST, dead])


@pytest.mark.parametrize("option", ["a", "a=", "a=x", "a=0"])
def test_an_interval_of_another_form_is_refused(option: str) -> None:
    with pytest.raises(pytest.UsageError, match="must be FILE::TEST=N with an N of at least 1"):
        read_intervals([option])


def test_all_named_tests_exist() -> None:
    """pytest ignores an option for a test that does not exist, so a renamed test would run with all its cases."""
    for name in (*SAMPLED, *ONCE):
        file, _, function = name.partition("::")
        text = (KERNELS / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text or not function, name


def test_tests_of_all_instruction_sets_run_with_the_first_one_only() -> None:
    first, other = (repetitions(is_first=isa == INSTRUCTION_SETS[0]) for isa in INSTRUCTION_SETS[:2])
    assert [option for option in other if option not in first] == [f"--deselect=tests/kernels/{name}" for name in ONCE]
    assert len(first) == len(SAMPLED)


def test_a_run_of_all_cases_includes_the_sweeps() -> None:
    assert selection(all_cases=True, every=None, is_first=False) == ["-m", "not page"]
    assert selection(all_cases=False, every=4, is_first=False) == ["-m", "not page", "--every=4"]
    assert selection(all_cases=False, every=None, is_first=True) == repetitions(is_first=True)
