"""Tests that a flood is refused early, and that all admitted requests get the right text.

tests/long/flood.py sends 10,000 requests and measures how long a refusal takes.
"""

from __future__ import annotations

import json
import socket

import pytest

from support.flood import BODIES, NUM_RUNNING, NUM_WAITING, SETTINGS, Client, Flood, Response, figures_of
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
    flood.judge(Response(0, status, head, json.dumps(body).encode(), 0.1))
    assert flood.counts == {counted: 1}
    assert bool(flood.problems) == (counted == "wrong")


@pytest.fixture
def connected():
    """Returns a client and the server's socket of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(listener.getsockname()[1])
        peer, _ = listener.accept()
    with client.socket, peer:
        yield client, peer


def test_a_refusal_takes_until_its_bytes_arrive_and_not_until_they_are_read(connected, monkeypatch):
    client, peer = connected
    now = iter([100.0, 103.0])
    monkeypatch.setattr("support.flood.perf_counter", lambda: next(now))
    monkeypatch.setattr("support.flood.arrival_time", lambda ancillary: 101.0)
    client.send(3, b"request")
    peer.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: 2\r\n\r\n{}")
    [response] = responses_of(client)
    head = b"http/1.1 429 too many requests\r\ncontent-length: 2\r\nretry-after: 2"
    assert response == Response(3, 429, head, b"{}", seconds=1.0, unread_s=2.0)


def responses_of(client):
    """Returns the responses of which the client has read the last byte."""
    return [response for response in [client.receive()] if response is not None]


@pytest.mark.parametrize("split", [1, 30, 50])
def test_a_response_in_two_pieces_is_read_whole(connected, split):
    client, peer = connected
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n" + b"a" * 20
    client.send(0, b"request")
    peer.sendall(whole[:split])
    assert responses_of(client) == []
    peer.sendall(whole[split:])
    [response] = responses_of(client)
    assert (response.status, response.body) == (200, b"a" * 20)


def test_bytes_after_a_response_are_an_error(connected):
    client, peer = connected
    client.send(0, b"request")
    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab")
    with pytest.raises(AssertionError, match="bytes after a response"):
        client.receive()
