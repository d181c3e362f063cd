"""Tests ``/profile/start`` and ``/profile/stop`` over a scripted engine.

The cases are request bodies, conflicts, failures and the time limit.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from llm_serving.errors import AgentLostError
from llm_serving.server.operations import profile as profile_module
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
    """A profile has stopped at its time limit. Its result must not answer the stop of a later profile."""
    server.app.state.profile.last = {"folder": "an old one", "agents": [AGENT]}
    folder = server.http.post("/profile/start").json()["folder"]
    assert server.http.post("/profile/stop").json()["folder"] == folder
    assert server.http.post("/profile/stop").status_code == 409


def test_profiles_have_folders_of_their_own(server, calls, monkeypatch):
    """Two profiles that start at the same time, by the clock, must not mix their files."""
    moment = time.localtime()
    monkeypatch.setattr(profile_module, "time", SimpleNamespace(
        strftime=lambda form: time.strftime(form, moment)
    ))  # fmt: skip
    for _ in range(3):
        server.http.post("/profile/start")
        server.http.post("/profile/stop")
    folders = [folder for folder in calls if folder]
    assert len(set(folders)) == len(folders) == 3


def test_the_timer_of_an_ended_profile_does_not_stop_the_next(server, calls, monkeypatch):
    """The timer of a profile may fire while a request stops this profile and another request starts the next."""
    late = []
    monkeypatch.setattr(profile_module, "_stop_after", lambda state, seconds: late.append(state.profile.folder))
    first = server.http.post("/profile/start").json()["folder"]
    server.http.post("/profile/stop")
    second = server.http.post("/profile/start").json()["folder"]
    asyncio.run(profile_module._stop_late(server.app.state, late[0]))
    assert (late, calls) == ([first, second], [first, None, second])
    assert server.http.post("/profile/stop").json()["folder"] == second


def test_a_start_without_a_reply_is_stopped(server, engine, calls, monkeypatch):
    """The agents may start the profile after the time limit. Without a stop, it would run on and no later profile could
    start.
    """
    told = []

    async def profile(folder, timeout):
        told.append(folder)
        if len(told) == 1:
            raise asyncio.TimeoutError
        return [dict(AGENT)]

    monkeypatch.setattr(engine, "profile", profile)
    answer = server.http.post("/profile/start")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "profile_failed")
    deadline = time.monotonic() + time_limit(10)
    while len(told) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told[1] is None
    while server.http.post("/profile/start").status_code == 409:
        assert time.monotonic() < deadline
    assert server.http.post("/profile/stop").status_code == 200


def test_a_profile_ends_with_its_engine(server, engine, calls, monkeypatch):
    """A reload of the model ends the engine. The profile then has no result, and the next profile may start."""
    lost = SimpleNamespace(state="stopped")
    folder = server.http.post("/profile/start").json()["folder"]
    server.app.state.profile.engine = lost
    again = server.http.post("/profile/start")
    assert (again.status_code, again.json()["folder"] != folder) == (200, True)

    async def ended(folder, timeout):
        raise AgentLostError("the agents have ended")

    monkeypatch.setattr(engine, "profile", ended)
    answer = server.http.post("/profile/stop")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "profile_conflict")
    assert "a reload of the model" in answer.json()["error"]["message"]
    started = server.http.post("/profile/start")
    assert started.status_code == 503
    assert server.http.post("/profile/stop").json()["error"]["message"].startswith("No profile is running")


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
