"""Tests that a server without requests sleeps, and that its first response after that has the present time."""

from __future__ import annotations

import time
import urllib.request
from email.utils import parsedate_to_datetime

from support.time_limits import time_limit
from support.wake_ups import wake_ups_in

IDLE_S = 4.0
MAX_WAKE_UPS = 2
"""Maximum number of wake-ups of all threads of the server and its agent in ``IDLE_S`` seconds. A timer that runs once a
second causes twice as many."""


def test_an_idle_server_and_its_agent_sleep(server):
    server.post("/v1/completions", {"prompt": "One two", "max_tokens": 4, "temperature": 0})
    pids = [server.pid, *(agent.pid for agent in server.agents())]
    assert len(pids) == 2
    until = time.monotonic() + time_limit(60)
    # After the start and after the request, some work remains, for example the memory of the KV cache.
    while (found := wake_ups_in(IDLE_S, pids)).total() > MAX_WAKE_UPS and time.monotonic() < until:
        pass
    assert found.total() <= MAX_WAKE_UPS, found
    before = int(time.time())
    with urllib.request.urlopen(server.url + "/health/live", timeout=time_limit(30)) as response:
        assert before <= parsedate_to_datetime(response.headers["date"]).timestamp() <= time.time()
