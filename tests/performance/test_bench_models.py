"""Tests the figures of reloads under load: which requests and times between tokens count, and a run with a server."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from performance.bench import model_reload
from performance.bench.model_reload import ReloadFigures, gaps_ms, measure_reloads
from performance.load.server_process import configured_server
from performance.load.stream import RequestRecord
from performance.program import LoadTestError
from support.time_limits import time_limit


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


@pytest.mark.sweep
def test_a_reload_of_a_busy_server_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_reload, "BEFORE_S", 1.0)
    monkeypatch.setattr(model_reload, "PAUSE_S", 1.0)
    with configured_server("reloads", "llama_tiny_cpu.yaml", [], tmp_path, time_limit(60.0)) as server:

        def reload() -> bytes:
            return server.post("/v1/models/llama_tiny/reload", {}, time_limit(60.0))

        figures = measure_reloads(server, "llama_tiny", 3, 1, reload)
    assert figures.failures == {}
    assert 1 <= figures.in_flight[0] <= 3, "a client may be between two requests"
    assert figures.requests > 3
    assert figures.tbt_before_ms.count > 0
    assert figures.tbt_during_ms.count > 0
