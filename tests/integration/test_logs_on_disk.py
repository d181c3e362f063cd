"""Tests the log files of a real server: permissions, rotation by another program, a full disk, and many refusals."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.recorded import RecordProperty
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

PROMPT = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    previous = os.umask(0o022)
    try:
        with running_server(tmp_path_factory.mktemp("logs")) as running:
            yield running
    finally:
        os.umask(previous)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + time_limit(20)
    while not condition():
        assert time.monotonic() < until, f"not seen: {what}"
        time.sleep(0.02)


def dropped(server: ServerProcess, reason: str) -> float:
    (value,) = [
        float(line.split()[-1])
        for line in server.get_text("/metrics").splitlines()
        if line.startswith(f'llm_serving_log_lines_dropped_total{{reason="{reason}"}}')
    ]
    return value


def test_only_the_user_may_read_logs_and_recordings(server: ServerProcess) -> None:
    server.post("/v1/completions", PROMPT)
    files = [path for path in server.folder.rglob("*") if path.is_file() and path.name != "stderr.txt"]
    assert {"server.log", "agent_0.log"} <= {path.name for path in files}
    assert any(path.parent.name == "flight" for path in files)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert set(modes.values()) == {"0o600"}, modes


def test_after_a_rename_and_a_signal_new_files_take_the_lines(server: ServerProcess) -> None:
    agent_log = server.folder / "agent_0.log"
    for path in (server.log, agent_log):
        path.rename(f"{path}.old")
    request = server.post("/v1/completions", PROMPT)["id"]
    wait_for(lambda: server.log.exists() and request in server.log.read_text(), "the request in the new file")
    assert not agent_log.exists()
    os.kill(server.pid, signal.SIGUSR1)
    wait_for(agent_log.exists, "the agent's new log")
    assert request not in Path(f"{server.log}.old").read_text()


def test_a_full_disk_loses_lines_and_no_request(server: ServerProcess, record_property: RecordProperty) -> None:
    expected = server.post("/v1/completions", PROMPT)["choices"][0]["text"]
    server.log.rename(f"{server.log}.full")
    server.log.symlink_to("/dev/full")
    before = dropped(server, "lost")
    found = [server.post("/v1/completions", PROMPT)["choices"][0]["text"] for _ in range(5)]
    record_property("changed_answers", f"{sum(text != expected for text in found)} of {len(found)}")
    assert found == [expected] * 5
    assert dropped(server, "lost") >= before + 10  # one line for the arrival and one for the end of each request
    server.log.unlink()
    request = server.post("/v1/completions", PROMPT)["id"]
    wait_for(lambda: bool(server.events("log_lines_lost")), "the number of lost lines")
    assert request in server.log.read_text()


def test_refusals_do_not_fill_the_log(server: ServerProcess) -> None:
    before = dropped(server, "suppressed")
    refused = len(server.events("request_refused"))
    late = {"X-Request-Start": f"t={time.time() - 30}"}
    for _ in range(60):
        assert server.post("/v1/completions", PROMPT | {"deadline_ms": 1000}, headers=late)["status"] == 504

    def num_counted() -> int:
        # The first line in a later second reports the number of suppressed lines.
        server.post("/v1/completions", PROMPT)
        written = len(server.events("request_refused")) - refused
        return written + sum(line["lines"] for line in server.events("log_lines_suppressed"))

    wait_for(lambda: num_counted() == 60, "each refusal, written or counted")
    assert dropped(server, "suppressed") - before == sum(
        line["lines"] for line in server.events("log_lines_suppressed")
    )
