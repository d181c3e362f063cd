"""Tests ``GET /requests/{request_id}/timeline``: its content, its errors, and the keys that may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.flight.one_request import find_timeline
from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import running
from support.recorded_request import record_requests


def test_the_timeline_comes_from_the_recording(tokenizer: Tokenizer, tmp_path: Path) -> None:
    record_requests(tmp_path / "flight", "mine")
    with running(FakeEngine(tokenizer), recordings_folder=str(tmp_path / "flight")) as server:
        assert server.http.get("/requests/mine/timeline").json() == find_timeline(tmp_path / "flight", "mine")
        for unknown in ("other", "-m", "x" * 300):
            refused = server.http.get(f"/requests/{unknown}/timeline")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        (tmp_path / "flight" / "a.flight").write_bytes(b"broken mine")
        refused = server.http.get("/requests/mine/timeline")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "recording_unreadable")


def test_without_a_recorder_the_error_names_the_setting(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer)) as server:
        refused = server.http.get("/requests/mine/timeline")
    assert refused.status_code == 404
    assert "log_config.flight_recorder_mib is 0" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("name", "status"), [("alice", 403), ("root", 200)])
def test_only_administrators_see_timelines(tokenizer: Tokenizer, tmp_path: Path, name: str, status: int) -> None:
    record_requests(tmp_path / "flight", "mine", others=0)
    access = access_for(tmp_path, "alice", "root admin")
    with running(FakeEngine(tokenizer), access, recordings_folder=str(tmp_path / "flight")) as server:
        assert server.http.get("/requests/mine/timeline", headers=bearer(name)).status_code == status
