"""Tests the profile of a real agent. It contains the operators of the steps, and profiling changes no token."""

from __future__ import annotations

import json
from pathlib import Path

PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def test_a_profile_has_steps_and_operators_and_changes_no_token(server):
    before = server.post("/v1/completions", PROMPT)["choices"][0]["text"]
    started = server.post("/profile/start", {"max_seconds": 120})
    assert started.get("agents") == 1, started
    folder = Path(started["folder"])
    assert folder.parent == server.folder / "profiles"
    assert server.post("/profile/start", {}).get("status") == 409
    during = server.post("/v1/completions", PROMPT)["choices"][0]["text"]
    stopped = server.post("/profile/stop", {})
    after = server.post("/v1/completions", PROMPT)["choices"][0]["text"]
    assert before == during == after

    [agent] = stopped["agents"]
    assert (agent["rank"], agent["error"], agent["steps"]) == (0, "", 12)
    assert agent["graph_us"] > 0
    steps = [json.loads(line) for line in (Path(agent["folder"]) / "steps.json").read_text().splitlines()]
    assert [step["kind"] for step in steps] == ["prefill", *["decode"] * 11]
    assert sum(step["graph_us"] for step in steps) == agent["graph_us"]
    assert all(step["sequences"] == 1 for step in steps)
    counts = {operator["name"]: operator["count"] for operator in agent["operators"]}
    assert max(counts.values()) >= 12, f"every step launches each operator: {counts}"
    assert sum(operator["total_ms"] for operator in agent["operators"]) <= agent["graph_us"] / 1000
    assert list(Path(agent["folder"]).rglob("trace_view.json"))
    assert server.post("/profile/stop", {}).get("status") == 409
    assert server.events("profile_stop")[-1]["folder"] == str(folder)
