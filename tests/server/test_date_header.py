"""Tests that every response has the present time in its header ``Date``, also after a time without requests."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime

import pytest

from llm_serving.server.http.dated_state import DatedState
from support.http_server import HttpServer, http_request, read_response


def test_the_header_has_the_present_second() -> None:
    now = 1_000_000_000.9
    state = DatedState(lambda: now)
    first = state.default_headers
    assert first == [(b"date", b"Sun, 09 Sep 2001 01:46:40 GMT")]
    assert state.default_headers is first, "the text is made once for each second"
    now += 0.1
    assert state.default_headers == [(b"date", b"Sun, 09 Sep 2001 01:46:41 GMT")]
    now -= 3600
    assert state.default_headers == [(b"date", b"Sun, 09 Sep 2001 00:46:41 GMT")], "an administrator set the clock"


@pytest.mark.parametrize("kind", ["whole", "stream", "not found", "not JSON"])
def test_a_response_after_idle_seconds_has_the_present_time(server: HttpServer, kind: str) -> None:
    requests = {
        "whole": http_request("/v1/completions", b'{"prompt": "a", "max_tokens": 1}'),
        "stream": http_request("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "stream": true}'),
        "not found": http_request("/nothing", b"", method="GET"),
        "not JSON": http_request("/v1/completions", b"{"),
    }
    for pause_s in (0.0, 1.2):
        time.sleep(pause_s)
        before = int(time.time())
        with server.raw(requests[kind].replace(b"\r\n", b"\r\nConnection: close\r\n", 1)) as connection:
            _, headers, _ = read_response(connection)
        assert before <= parsedate_to_datetime(headers["date"]).timestamp() <= time.time()


def test_requests_of_one_connection_have_their_own_times(server: HttpServer) -> None:
    request = http_request("/health/live", b"", method="GET")
    with server.raw(b"") as connection:
        dates = []
        for _ in range(2):
            connection.sendall(request)
            dates.append(read_response(connection)[1]["date"])
            time.sleep(1.1)
    first, second = (parsedate_to_datetime(date) for date in dates)
    assert first < second
    assert all(re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", date) for date in dates), dates
