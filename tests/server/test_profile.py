"""Tests ``/profile/start`` and ``/profile/stop`` over a scripted engine.

The cases are request bodies, conflicts, failures and the time limit.
"""

from __future__ import annotations

import time

import pytest

from llm_serving.server.state import RunningProfile
from support.time_limits import time_limit

AGENT = {"rank": 0, "error": "", "steps": 3}


@pytest.fixture
def calls(server, engine, monkeypatch):
    """Provides a list of the folders that the engine received to profile into. None stands for the end of a profile."""
    server.app.state.profile = RunningProfile()
    made = []

    async def profile(folder, timeout):
        made.append(folder)
        return [dict(AGENT)]

    monkeypatch.setattr(engine, "profile", profile)
    return made


def test_start_and_stop(server, calls):
    started = server.http.post("/profile/start")
    assert started.status_code == 200, started.text
    assert (started.status_code, started.json()["max_seconds"], started.json()["agents"]) == (200, 60, 1)
    assert server.http.post("/profile/start").status_code == 409
    assert server.http.post("/profile/stop").json() == {"folder": started.json()["folder"], "agents": [AGENT]}
    assert server.http.post("/profile/stop").json()["error"]["code"] == "profile_conflict"
    assert calls == [started.json()["folder"], None]


def test_a_profile_stops_by_itself(server, calls):
    folder = server.post("/profile/start", {"max_seconds": 1}).json()["folder"]
    deadline = time.monotonic() + time_limit(10)
    while calls != [folder, None]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.http.post("/profile/stop").json() == {"folder": folder, "agents": [AGENT]}
    assert server.http.post("/profile/stop").status_code == 409


def test_a_new_profile_forgets_the_last_one(server, calls):
    """The result of a profile that stopped by itself is not the answer to the stop of a later profile."""
    server.app.state.profile.last = {"folder": "an old one", "agents": [AGENT]}
    folder = server.http.post("/profile/start").json()["folder"]
    assert server.http.post("/profile/stop").json()["folder"] == folder
    assert server.http.post("/profile/stop").status_code == 409


@pytest.mark.parametrize("seconds", [0, 601, "60", True])
def test_wrong_times_are_refused(server, calls, seconds):
    answer = server.post("/profile/start", {"max_seconds": seconds})
    assert (answer.status_code, answer.json()["error"]["param"], calls) == (400, "max_seconds", [])


def test_an_agents_failure_is_the_answer_and_no_profile_runs(server, engine, monkeypatch):
    async def profile(folder, timeout):
        return [{"rank": 0, "error": "agent 0 cannot write"}] if folder else [dict(AGENT)]

    monkeypatch.setattr(engine, "profile", profile)
    answer = server.http.post("/profile/start")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "agent 0 cannot write")
    assert server.http.post("/profile/stop").status_code == 409
