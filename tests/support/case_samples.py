"""Selects a part of the cases of parametrised tests, and checks that each value of each parameter remains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

COVER = 0
"""A special value instead of an interval: the sample of the function then has each value of each parameter, in as few
cases as possible.
"""


def read_intervals(options: Sequence[str]) -> dict[str, int]:
    """Returns the interval of each test function from options ``FILE::TEST=N`` or ``FILE::TEST=cover``.

    Raises UsageError for another form.
    """
    intervals = {}
    for option in options:
        function, equals, number = option.partition("=")
        if not (equals and (number == "cover" or (number.isdigit() and int(number) > 0))):
            raise pytest.UsageError(f"--every-of {option}: must be FILE::TEST=N with an N of at least 1, or =cover")
        intervals[function] = COVER if number == "cover" else int(number)
    return intervals


def select_cases(items: Sequence[pytest.Item], every: int, intervals: Mapping[str, int]) -> list[pytest.Item]:
    """Returns every N-th case of each test function. N is the function's interval, or ``every`` if it has none.

    For a function with the interval ``COVER``, returns the cases that ``cover`` chooses.
    """
    covered = [function for function, interval in intervals.items() if interval == COVER]
    kept = {id(item) for each in covered for item in cover([item for item in items if function_of(item) == each])}
    seen, chosen = Counter[str](), []
    for item in items:
        function = function_of(item)
        interval = intervals.get(function, every)
        if id(item) in kept or (interval != COVER and seen[function] % interval == 0):
            chosen.append(item)
        seen[function] += 1
    return chosen


def cover(items: Sequence[pytest.Item], times: int = 1) -> list[pytest.Item]:
    """Returns cases of one function that have each value of each parameter, as few as a greedy choice finds.

    Each value occurs ``times`` times in the chosen cases, or in all cases that have it if these are fewer. Chooses the
    case with the most values that still miss occurrences. If there are several, chooses the case whose values were
    chosen least.
    """
    left = [(item, _values_of(item)) for item in items]
    used, chosen = Counter[tuple[str, str]](), list[pytest.Item]()
    occurrences = Counter(value for _, values in left for value in values)
    missing = {value: min(times, number) for value, number in occurrences.items()}
    while missing:
        at = max(range(len(left)), key=lambda at: _preference(left[at][1], missing, used))
        item, values = left.pop(at)
        chosen.append(item)
        used.update(values)
        missing = {value: number for value, number in missing.items() if used[value] < number}
    return chosen


def repetitions_of(items: Sequence[pytest.Item], functions: Sequence[str], times: int) -> list[pytest.Item]:
    """Returns the cases of the ``functions`` that a cover leaves out, in which each value occurs ``times`` times."""
    cases: dict[str, list[pytest.Item]] = {function: [] for function in functions}
    for item in items:
        if (function := function_of(item)) in cases:
            cases[function].append(item)
    kept = {id(item) for group in cases.values() for item in cover(group, times)}
    return [item for group in cases.values() for item in group if id(item) not in kept]


def check_names(items: Sequence[pytest.Item], root: Path, names: Sequence[str]) -> None:
    """Raises UsageError if one of the beginnings of names of cases fits no case, for example of a renamed test.

    Its file must exist in ``root``. If ``items`` has no case of the file, only this is checked.
    """
    collected: dict[str, list[str]] = {}
    for item in items:
        collected.setdefault(_file_of(item.nodeid), []).append(item.nodeid)
    dead = [
        name
        for name in names
        if not (root / _file_of(name)).is_file()
        or ((cases := collected.get(_file_of(name))) and not any(case.startswith(name) for case in cases))
    ]
    if dead:
        raise pytest.UsageError(f"entries of tests/conftest.py that select no case: {', '.join(dead)}")


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def _preference(
    values: set[tuple[str, str]], missing: Mapping[tuple[str, str], int], used: Counter[tuple[str, str]]
) -> tuple[int, int]:
    """Returns how many values still miss occurrences, and minus the number of times that the values were used."""
    return len(values & missing.keys()), -sum(used[value] for value in values)


def check_sample(items: Sequence[pytest.Item], chosen: Sequence[pytest.Item], intervals: Mapping[str, int]) -> None:
    """Checks that a sample covers each value of each parameter. Only functions that have an interval are checked.

    If N has no common factor with the number of values, every N-th case usually covers them. Raises UsageError with the
    values that are missing.
    """
    for function in intervals:
        missing = sorted(_values(items, function) - _values(chosen, function))
        if missing:
            text = ", ".join(f"{name} {value}" for name, value in missing)
            raise pytest.UsageError(f"--every-of {function}={intervals[function]} leaves out {text}; use another N")


def function_of(item: pytest.Item) -> str:
    """Returns ``FILE::TEST`` of a case."""
    return item.nodeid.partition("[")[0]


def _values(items: Sequence[pytest.Item], function: str) -> set[tuple[str, str]]:
    """Returns the name and the value of each parameter of the function's cases among ``items``."""
    return {value for item in items if function_of(item) == function for value in _values_of(item)}


def _values_of(item: pytest.Item) -> set[tuple[str, str]]:
    call = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in call.params.items()} if call is not None else set()
