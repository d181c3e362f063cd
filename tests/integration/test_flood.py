"""Tests that a flood is refused early, and that all admitted requests get the right text.

tests/long/flood.py sends 10,000 requests and measures how long a refusal takes.
"""

from __future__ import annotations

import json

import pytest

from support.flood import BODIES, NUM_RUNNING, NUM_WAITING, SETTINGS, Flood, figures_of
from support.server_process import running_server

CONNECTIONS = NUM_WAITING + NUM_RUNNING + 16


def test_a_flood_is_refused_and_admitted_requests_get_the_right_text(tmp_path, shallow_model):
    with running_server(tmp_path, [*SETTINGS, f"model_config.model_path={shallow_model}"]) as server:
        figures, problems = figures_of(server, 400, CONNECTIONS)
        assert problems == []
        assert (figures["admitted"] + figures["refused"], figures["wrong"]) == (400, 0)
        # The first requests find an empty queue.
        assert figures["admitted"] >= NUM_WAITING
        ended = [event["finish_reason"] for event in server.events("request_end")]
        assert ended == ["length"] * (figures["admitted"] + len(BODIES))


@pytest.fixture
def flood():
    """Returns a flood without connections. The right text of each request is "right"."""
    return Flood(0, ["right"] * len(BODIES), 0)


GOOD_REFUSAL = b"http/1.1 429 too many requests\r\nretry-after: 2"


@pytest.mark.parametrize(
    ("status", "head", "body", "counted"),
    [
        (200, b"", {"choices": [{"text": "right"}]}, "admitted"),
        (200, b"", {"choices": [{"text": "wrong"}]}, "wrong"),
        (429, GOOD_REFUSAL, {"error": {"code": "queue_full"}}, "refused"),
        (429, GOOD_REFUSAL, {"error": {"code": "rate_limit"}}, "wrong"),
        (429, b"http/1.1 429 too many requests", {"error": {"code": "queue_full"}}, "wrong"),
        (503, GOOD_REFUSAL, {"error": {"code": "queue_full"}}, "wrong"),
    ],
)
def test_only_right_texts_and_refusals_of_a_full_queue_count_as_good(flood, status, head, body, counted):
    flood.judge(0, status, head, json.dumps(body).encode(), 0.1)
    assert flood.counts == {counted: 1}
    assert bool(flood.problems) == (counted == "wrong")
