"""Tests load measurements between two probes of the machine's speed. The tests replace the probes by given speeds.

If the speed changed during a load, the load runs again. The parts of a long load are joined.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import astuple

import pytest

from performance.load.client import LoadRun
from performance.load.options import LoadOptions
from performance.load.statistics import measure
from performance.load.stream import RequestRecord
from performance.simulation.reality_loads import Load
from performance.simulation.reality_report import ComparedLoad, closing_text, comparison_json, result_text
from performance.simulation.runs import NOWHERE
from performance.simulation.slowdown import Slowdown
from performance.simulation.steadiness import (
    TOLERANCE,
    Probe,
    Try,
    comparable,
    joined,
    run_until_steady,
    steadiest,
)
from performance.simulation.validate import Compared

OPTIONS = LoadOptions(NOWHERE, rate=1.0, duration=2.0)


def a_run(start: float) -> LoadRun:
    """Returns the run of a load with two requests. They take 2 s and 3 s and arrive one second apart."""
    first = RequestRecord(0, start, start + 0.25, array("d", [start + 1.0, start + 2.0]), start + 2.0, 200, 7, 2, True)
    second = RequestRecord(1, start + 1.0, start + 1.0, array("d", [start + 3.0]), start + 4.0, 200, 7, 1, True)
    return LoadRun(OPTIONS, "model", [first, second], start, 1e9, 0.5, interrupted=False)


def planted(slowdowns: list[float], most: int, others: Sequence[float] = ()) -> list[Try]:
    """Runs a load until the machine's speed is steady, with given speeds, and returns all attempts.

    ``slowdowns`` are the results of the speed probes, in order. ``others`` has, for each attempt, the fraction of
    processor time that other programs use. At most ``most`` attempts are made.
    """
    speeds: Iterator[float] = iter(slowdowns)

    def probe() -> Probe:
        speed = next(speeds)
        return Probe([a_run(0.0)], Slowdown(speed, speed, speed, 2.0 * speed))

    taken = iter(others)
    return run_until_steady(lambda: (a_run(0.0), next(taken, 0.0)), probe, probe(), most)


def probes(tries: list[Try]) -> list[tuple[float, float]]:
    return [(one.before.slowdown.steps, one.after.slowdown.steps) for one in tries]


def test_a_load_runs_once_on_a_steady_machine() -> None:
    (only,) = planted([1.1, 1.12, 5.0], 4)
    assert only.is_steady
    assert astuple(only.slowdown) == pytest.approx((1.11, 1.11, 1.11, 2.22))


def test_a_load_is_repeated_until_its_probes_agree() -> None:
    tries = planted([0.85, 0.95, 1.05, 1.06, 5.0], 4)
    assert probes(tries) == [(0.85, 0.95), (0.95, 1.05), (1.05, 1.06)]
    assert [one.is_steady for one in tries] == [False, False, True]
    assert steadiest(tries) is tries[-1]


@pytest.mark.parametrize("faster_after", [False, True])
def test_the_tolerance_is_relative_and_symmetric(faster_after: bool) -> None:
    for factor, is_steady in ((1.0 + TOLERANCE - 0.001, True), (1.0 + TOLERANCE + 0.001, False)):
        speeds = [2.0, 2.0 * factor]
        (only,) = planted(speeds[::-1] if faster_after else speeds, 1)
        assert only.is_steady is is_steady


def test_on_an_unsteady_machine_the_closest_try_is_returned() -> None:
    tries = planted([1.0, 1.2, 1.1, 1.3], 3)
    assert probes(tries) == [(1.0, 1.2), (1.2, 1.1), (1.1, 1.3)]
    assert steadiest(tries) is tries[1]
    assert not steadiest(tries).is_steady


def test_a_load_is_repeated_if_other_processes_used_the_cores() -> None:
    tries = planted([1.0, 1.0, 1.0, 1.0], 3, others=[0.5, 0.03, 0.01])
    assert [one.is_steady for one in tries] == [False, False, True]
    assert steadiest(tries[:2]) is tries[1]


def test_runs_are_joined_one_after_the_other() -> None:
    whole = joined([a_run(100.0), a_run(50.0)])
    assert [record.index for record in whole.records] == [0, 1, 2, 3]
    assert [(record.due, record.sent, record.end) for record in whole.records] == [
        (100.0, 100.25, 102.0), (101.0, 101.0, 104.0), (104.0, 104.25, 106.0), (105.0, 105.0, 108.0),
    ]  # fmt: skip
    assert list(whole.records[2].piece_times) == [105.0, 106.0]
    one, both = measure(a_run(0.0)), measure(whole)
    assert both.total_time_s == 2 * one.total_time_s
    assert both.output_tokens_per_s == one.output_tokens_per_s
    assert both.ttft_ms.p50 == one.ttft_ms.p50
    assert both.client_cpu_percent == one.client_cpu_percent


def told(speed: float) -> dict[str, float]:
    return {"steps": speed, "few_rows": speed, "many_rows": speed, "prompts": 2.0 * speed}


def between(before: float, after: float) -> str:
    one, other = (f"{speed:.3f} ({speed:.3f}, {speed:.3f}, {2 * speed:.3f})" for speed in (before, after))
    return f"{one} before it, {other} after it; other processes took 0.0% of the cores' time"


LOAD = Load("some", 2.0, 5.0, (4, 8), (8, 16), 1, parts=2)


def compared(*parts: list[float], error: float = 0.05) -> ComparedLoad:
    return ComparedLoad(LOAD, [planted(part, 2) for part in parts], [Compared("total s", 1.0, 1.0 + error)])


def test_discarded_tries_are_reported() -> None:
    result = compared([1.0, 1.01], [1.01, 1.2, 1.21])
    lines = result_text(result, 1.0).splitlines()
    assert lines[0].startswith("some: 2 requests/s for 2 times 5 s")
    assert lines[2:5] == [
        f"  part 0: {between(1.00, 1.01)}, compared",
        f"  part 1: {between(1.01, 1.20)}, not steady, discarded",
        f"  part 1: {between(1.20, 1.21)}, compared",
    ]
    content = comparison_json([result])
    assert content["loads"]["some"]["steady"]
    assert content["loads"]["some"]["parts"][1] == [
        {"before": told(1.01), "after": told(1.2), "others": 0.0, "steady": False, "compared": False},
        {"before": told(1.2), "after": told(1.21), "others": 0.0, "steady": True, "compared": True},
    ]
    assert closing_text([result]) == "all loads: 1 of 1 figures within 10%, the largest error is 5%"


def test_a_part_without_a_steady_try_is_left_out() -> None:
    result = compared([1.0, 1.01], [1.01, 1.2, 1.3], [1.3, 1.31])
    assert comparable(result.parts) == [result.parts[0][0], result.parts[2][0]]
    told = [line.rpartition(", ")[2] for line in result_text(result, 1.0).splitlines()[2:6]]
    assert told == ["compared", "discarded", "discarded", "compared"]
    content = comparison_json([result])["loads"]["some"]
    assert content["steady"]
    assert [[one["compared"] for one in tries] for tries in content["parts"]] == [[True], [False, False], [True]]
    assert closing_text([result]).startswith("all loads: 1 of 1")


def test_a_load_with_half_of_its_parts_unsteady_does_not_count() -> None:
    steady, unsteady = compared([1.0, 1.01], [1.01, 1.02], error=0.2), compared([1.0, 1.01], [1.01, 1.2, 1.3])
    assert comparable(unsteady.parts) == [unsteady.parts[0][0], unsteady.parts[1][1]]
    assert f"part 1: {between(1.20, 1.30)}, not steady, compared" in result_text(unsteady, 1.0)
    assert not comparison_json([unsteady])["loads"]["some"]["steady"]
    assert closing_text([steady, unsteady]).splitlines() == [
        "loads while the machine was steady: 0 of 1 figures within 10%, the largest error is 20%",
        "discarded: some: in half of the parts the probes always differed by more than 4%, or other processes took more"
        " than 2% of the cores' time",
    ]
    assert closing_text([unsteady]).startswith("discarded")
