"""Tests the timeline of one request from a flight recording. Steps take 10 ms on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.flight import one_request
from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.one_request import find_timeline
from llm_serving.telemetry.receipt import Phase
from support.recorded_request import MAX_TOKENS, STEP_S, record_requests


def test_an_undisturbed_request_has_three_phases(tmp_path: Path) -> None:
    request = record_requests(tmp_path, "mine", others=0)
    timeline = find_timeline(tmp_path, "mine")
    assert timeline is not None
    assert [span["phase"] for span in timeline["spans"]] in (["prefill", "decode"], ["queued", "prefill", "decode"])
    assert [chunk["tokens"] for chunk in timeline["chunks"]] == [16, 14]
    assert [chunk["step_requests"] for chunk in timeline["chunks"]] == [1, 1]
    assert timeline["decode_steps"]["count"] == MAX_TOKENS - 1
    assert (timeline["end"], timeline["is_complete"]) == ("length", True)
    assert timeline["left_out"] == {"spans": 0, "chunks": 0}
    assert len(request.output_token_ids) == MAX_TOKENS


def test_a_preempted_request_shows_when_it_was_preempted(tmp_path: Path) -> None:
    request = record_requests(tmp_path, "mine")
    assert request.num_preemptions > 0
    timeline = find_timeline(tmp_path, "mine")
    assert timeline is not None
    spans = timeline["spans"]
    assert [span["phase"] for span in spans].count("preempted") == request.num_preemptions
    ends = [span["begin_ms"] + span["ms"] for span in spans]
    assert [span["begin_ms"] for span in spans[1:]] == pytest.approx(ends[:-1])
    whole = sum(request.receipt.phase_us) / 1000
    assert ends[-1] == pytest.approx(whole, abs=0.01)
    queued = sum(span["ms"] for span in spans if span["phase"] == "queued")
    assert queued == pytest.approx(request.receipt.phase_us[Phase.QUEUED] / 1000, abs=0.01)
    chunks = timeline["chunks"]
    assert sum(chunk["tokens"] for chunk in chunks) > len(request.prompt_token_ids)
    assert [chunk["begin_ms"] for chunk in chunks] == sorted(chunk["begin_ms"] for chunk in chunks)
    assert max(chunk["step_requests"] for chunk in chunks) > 1


def test_a_timeline_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_requests(tmp_path, "mine")
    whole = find_timeline(tmp_path, "mine")
    monkeypatch.setattr(one_request, "MAX_SPANS", 2)
    monkeypatch.setattr(one_request, "MAX_CHUNKS", 1)
    cut = find_timeline(tmp_path, "mine")
    assert whole is not None
    assert cut is not None
    assert cut["spans"] == whole["spans"][:2]
    assert cut["chunks"] == whole["chunks"][:1]
    assert cut["left_out"] == {"spans": len(whole["spans"]) - 2, "chunks": len(whole["chunks"]) - 1}


def test_a_request_whose_arrival_was_overwritten_is_found(tmp_path: Path) -> None:
    """The header of each segment names the requests that are served at its start."""
    record_requests(tmp_path, "mine", others=12, ring_bytes=1 << 14)
    files = sorted(tmp_path.glob("*.flight"))
    assert len(files) > 1
    files[0].unlink()
    timeline = find_timeline(tmp_path, "mine")
    assert timeline is not None
    assert not timeline["is_complete"]
    assert timeline["spans"][0]["begin_ms"] == 0.0
    assert timeline["spans"][-1]["phase"] == "decode"
    assert timeline["decode_steps"]["count"] > 0


def test_an_unknown_request_has_no_timeline(tmp_path: Path) -> None:
    assert find_timeline(tmp_path, "mine") is None
    record_requests(tmp_path, "mine", others=0)
    assert find_timeline(tmp_path, "min") is None


def test_the_last_replica_counts(tmp_path: Path) -> None:
    record_requests(tmp_path / "replica_0", "mine", others=0)
    record_requests(tmp_path / "replica_1", "theirs", others=0)
    timeline = find_timeline(tmp_path, "theirs")
    assert timeline is not None
    assert timeline["request_id"] == "theirs"


def test_a_file_that_is_no_segment_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.flight").write_bytes(b"not a segment with mine in it")
    with pytest.raises(FlightRecordingError):
        find_timeline(tmp_path, "mine")


def test_times_are_milliseconds(tmp_path: Path) -> None:
    record_requests(tmp_path, "mine", others=0)
    timeline = find_timeline(tmp_path, "mine")
    assert timeline is not None
    assert sum(span["ms"] for span in timeline["spans"]) == pytest.approx((MAX_TOKENS + 1) * STEP_S * 1000)
