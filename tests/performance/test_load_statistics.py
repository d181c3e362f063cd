"""Tests the figures that load tests compute, exactly, from made-up times."""

from array import array
from pathlib import Path

import pytest

from performance.load.client import LoadRun
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.report import format_report, report_json
from performance.load.statistics import measure
from performance.load.stream import RequestRecord

START = 1000.0


def success(index: int, due: float, times: list[float], end: float, tokens: int, late: float = 0.0) -> RequestRecord:
    return RequestRecord(
        index,
        due=START + due,
        sent=START + due + late,
        piece_times=array("d", [START + time for time in times]),
        end=START + end,
        http_status=200,
        prompt_tokens=10,
        output_tokens=tokens,
        tokens_known=True,
        finish_reason="length",
        request_id=f"cmpl-{index}",
    )


def failure(index: int, due: float, kind: str) -> RequestRecord:
    return RequestRecord(index, due=START + due, sent=START + due, end=START + due + 1, failure=kind, detail="why")


def run_of(*records: RequestRecord, **options: object) -> LoadRun:
    load = LoadOptions(Endpoint("127.0.0.1", 8835), rate=1.0, duration=4.0, **options)
    return LoadRun(load, "tiny", list(records), START, 1.75e9, client_cpu_s=0.4, interrupted=False)


def line_of(report: str, name: str) -> list[str]:
    """Returns the figures in the row ``name`` of a report."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"  {name}  ")]
    return line.removeprefix(f"  {name}").split()


RECORDS = (
    success(0, 0.0, [0.125, 0.25, 0.5, 0.625], end=0.75, tokens=5),
    success(1, 1.0, [1.5], end=1.5, tokens=1),
    success(2, 2.0, [2.25, 3.25], end=4.0, tokens=2, late=0.125),
    failure(3, 3.0, "http 429"),
)


def test_latencies_count_from_the_send_and_lateness_is_separate() -> None:
    first, second, third, fourth = measure(run_of(*RECORDS)).per_request
    assert (first.ttft_ms, first.tpot_ms, first.e2e_s, first.normalized_latency_ms) == (125.0, 125.0, 0.75, 150.0)
    assert (second.ttft_ms, second.tpot_ms, second.e2e_s, second.normalized_latency_ms) == (500.0, None, 0.5, 500.0)
    assert (third.ttft_ms, third.tpot_ms, third.e2e_s, third.lateness_ms) == (125.0, 1000.0, 1.875, 125.0)
    assert (third.ttft_from_due_ms, third.e2e_from_due_s) == (250.0, 2.0)
    assert (fourth.ttft_ms, fourth.tpot_ms, fourth.e2e_s, fourth.is_good) == (None, None, None, False)
    assert (first.max_tbt_ms, second.max_tbt_ms, third.max_tbt_ms) == (250.0, 0.0, 1000.0)


def test_totals() -> None:
    figures = measure(run_of(*RECORDS))
    assert (figures.requests, figures.completed, figures.failed, figures.failures) == (4, 3, 1, {"http 429": 1})
    assert (figures.total_time_s, figures.qps) == (4.0, 0.75)
    assert (figures.prompt_tokens, figures.output_tokens, figures.output_tokens_per_s) == (30, 8, 2.0)
    assert figures.client_cpu_percent == 10.0
    assert figures.tbt_ms.count == 4
    assert figures.tbt_ms.mean == 375.0


def test_goodput_needs_every_objective() -> None:
    assert measure(run_of(*RECORDS, slo_tpot_ms=1000.0)).good_requests == 3
    assert measure(run_of(*RECORDS, slo_tpot_ms=999.0)).good_requests == 2
    assert measure(run_of(*RECORDS, slo_tpot_ms=1000.0, slo_ttft_ms=499.0)).good_requests == 2
    assert measure(run_of(*RECORDS, slo_tpot_ms=1000.0, slo_tbt_ms=500.0)).good_requests == 2
    figures = measure(run_of(*RECORDS, slo_tpot_ms=1000.0))
    assert (figures.goodput_fraction, figures.goodput_per_s) == (0.75, 0.75)


def test_a_late_client_is_the_bottleneck() -> None:
    assert measure(run_of(*RECORDS)).client_was_bottleneck
    assert not measure(run_of(*RECORDS[:2])).client_was_bottleneck


def test_a_run_without_success_has_no_latencies() -> None:
    figures = measure(run_of(failure(0, 0.0, "connect")))
    assert figures.ttft_ms.as_dict()["mean"] is None
    assert (figures.qps, figures.output_tokens_per_s, figures.prompt_tokens) == (0.0, 0.0, None)
    report = format_report(run_of(failure(0, 0.0, "connect")), figures)
    assert line_of(report, "time to first token (ms)") == ["-"] * 5


def test_the_json_has_its_documented_keys() -> None:
    run = run_of(*RECORDS)
    content = report_json(run, measure(run))
    assert (content["requests"], content["failed"], content["total_time_s"]) == (4, 1, 4.0)
    assert content["output_tokens_per_s"] == 2.0
    assert content["ttft_ms"] == {
        "count": 3,
        "mean": 250.0,
        "p50": 125.0,
        "p90": 425.0,
        "p95": pytest.approx(462.5),
        "p99": 492.5,
        "min": 125.0,
        "max": 500.0,
    }
    assert content["ttft_from_due_ms"]["mean"] == pytest.approx(875 / 3)
    assert content["e2e_from_due_s"]["max"] == 2.0
    assert content["client"]["lateness_ms"]["max"] == 125.0
    assert content["client"]["sends_were_late"]
    assert content["tpot_ms"]["mean"] == 562.5
    assert content["e2e_s"]["p50"] == 0.75
    assert [one["index"] for one in content["per_request"]] == [0, 1, 2, 3]
    assert content["per_request"][2] == {
        "index": 2,
        "request_id": "cmpl-2",
        "due_s": 2.0,
        "lateness_ms": 125.0,
        "ttft_ms": 125.0,
        "tpot_ms": 1000.0,
        "max_tbt_ms": 1000.0,
        "e2e_s": 1.875,
        "prompt_tokens": 10,
        "output_tokens": 2,
        "pieces": 2,
        "finish_reason": "length",
        "http_status": 200,
        "failure": None,
        "detail": None,
    }


def test_the_report() -> None:
    run = run_of(*RECORDS)
    report = format_report(run, measure(run))
    assert "http://127.0.0.1:8835 openai model tiny: 1 requests/s (poisson) for 4 s, seed 0" in report
    assert "All Tasks Done; Exec Time is 4.00 s" in report
    assert "  failed: http 429: 1\n    why" in report
    assert line_of(report, "time to first token (ms)") == ["250", "125", "425", "492", "500"]
    assert line_of(report, "requests") == ["4"]
    assert "  goodput  25.0 % of requests, 0.250 per second (TTFT <= 1000 ms, TPOT <= 100 ms)" in report
    assert "WARNING: the client was too busy" in report
    assert "WARNING: requests were sent 31.2 ms late on average; TTFT counted from the due time is 292" in report


def test_the_picture_of_a_run_without_success(tmp_path: Path) -> None:
    from performance.load.plot import write_plot

    run = run_of(failure(0, 0.0, "connect"))
    write_plot(tmp_path / "run.png", run, measure(run))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
