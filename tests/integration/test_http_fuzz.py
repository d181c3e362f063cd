"""Sends a few hundred fuzz requests to a real server. tests/long/fuzz_http.py sends many more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from support.http_fuzz import FuzzAnswer, RequestDrawing, exchange
from support.http_fuzz_run import HttpFindings, fuzz_http
from support.large_inputs import MIB, LargeInput, figures, large_requests, send_large


def test_fuzz_requests_get_no_5xx_and_change_no_text(server):
    found = fuzz_http(server, requests=300, seed=50_000)
    assert found.failures == []
    assert found.hangs == []
    assert server.post("/profile/stop", {})["error"]["code"] == "profile_conflict", "the run leaves no profile running"
    assert found.text_is_equal
    assert found.statuses[200] > 30
    assert found.statuses[400] > 30
    assert len(found.operations) >= 15


def test_large_inputs_get_no_5xx(server):
    found = list(send_large(server, large_requests(sizes=[MIB], counts=[10_000])))
    assert {each.status for each in found if "detokenize" in each.place} == {200}
    assert {each.status for each in found if "/v1/completions" in each.place} == {400}
    assert figures(found)["5xx"] == 0


@pytest.mark.parametrize(("bad", "passes"), [({}, True), ({"stall_s": 0.3}, False), ({"is_failure": True}, False)])
def test_a_stall_or_a_5xx_of_a_large_input_fails_the_run(bad, passes):
    good = LargeInput("POST /tokenize", 400, is_failure=False, seconds=0.5, stall_s=0.2, waited_s=0.15)
    assert figures([good, replace(good, **bad)])["pass"] is passes


def test_the_drawing_covers_every_operation_and_repeats_by_seed(server):
    drawing = RequestDrawing(server.get("/openapi.json"), "llama_tiny")
    places = Counter(drawing.draw(seed).place for seed in range(800))
    assert set(places) == {f"{method} {path}" for method, path, _ in drawing.operations}
    assert [drawing.draw(7), drawing.draw(8)] == [drawing.draw(7), drawing.draw(8)]


def test_a_whole_request_is_answered_to_its_end(server):
    drawing = RequestDrawing(server.get("/openapi.json"), "llama_tiny")
    request = next(each for seed in range(999) if (each := drawing.draw(seed)).place == "GET /v1/models")
    answer = exchange(int(server.url.rsplit(":", 1)[1]), request, 30.0)
    assert (answer.status, b"llama_tiny" in answer.body) == (200, True)


@pytest.mark.parametrize(
    ("status", "body", "is_failure"),
    [
        (500, b'{"error": {"code": "internal_error"}}', True),
        (503, b"", True),
        (504, b'{"error": {"code": "deadline_exceeded"}}', False),
        (400, b"", False),
        (0, b"", False),
    ],
)
def test_a_5xx_is_a_failure_unless_the_request_asked_for_it(status, body, is_failure):
    assert FuzzAnswer(status, body).is_failure is is_failure


def test_each_finding_fails_the_run():
    good = {"text_is_equal": True}
    assert HttpFindings(**good).is_good
    for bad in (
        {"failures": ["a"]},
        {"hangs": ["a"]},
        {"stalls": ["a"]},
        {"growth_mib": 99.0},
        {"text_is_equal": False},
    ):
        assert not HttpFindings(**{**good, **bad}).is_good, bad
