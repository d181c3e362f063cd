"""Tests the figures of reloads under load: which requests and which times between tokens count."""

from __future__ import annotations

from array import array

import pytest

from performance.bench.model_reload import ReloadFigures, gaps_ms
from performance.load.stream import RequestRecord
from performance.program import LoadTestError


def record(sent: float, *pieces: float, failure: str | None = None) -> RequestRecord:
    """Returns a request that ends with its last piece."""
    return RequestRecord(0, due=sent, sent=sent, piece_times=array("d", pieces), end=pieces[-1], failure=failure)


def test_a_stall_that_a_reload_causes_counts_as_during_the_reload() -> None:
    records = [record(0.0, 1.0, 2.0, 5.0, 5.5)]
    before, during = [(0.0, 3.0)], [(3.0, 4.0)]
    assert gaps_ms(records, before, are_whole=True) == [1000.0]
    assert gaps_ms(records, during, are_whole=False) == [3000.0], "the next piece came after the reload"
    assert gaps_ms(records, [(0.0, 2.0), (5.0, 6.0)], are_whole=True) == [1000.0, 500.0]


def test_failures_and_requests_in_flight_are_counted() -> None:
    records = [record(0.0, 1.0, 4.0), record(0.5, 1.0, 9.0, failure="http 503"), record(3.5, 4.0, 4.5)]
    figures = ReloadFigures.of(2, records, [(0.0, 3.0)], [(3.0, 5.0)])
    assert figures.failures == {"http 503": 1}
    assert (figures.requests, figures.in_flight, figures.reload_s) == (3, [2], [2.0])
    assert figures.as_json()["tbt_during_ms"]["max"] == 8000.0


def test_a_reload_without_requests_is_an_error() -> None:
    with pytest.raises(LoadTestError, match=r"are \[1, 0\]"):
        ReloadFigures.of(1, [record(0.0, 1.0, 2.0)], [], [(1.5, 3.0), (6.0, 7.0)])
