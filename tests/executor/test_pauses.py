"""Tests that a pause of the server's process does not count for its agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from llm_serving.executor.base import AgentReady
from llm_serving.executor.pauses import COUNTED_S, PauseWatch
from support.executor_steps import events_until, prefill, results
from support.paused_executor import GRACE_S, STEP_TIMEOUT_S
from support.small_configs import REPOSITORY
from support.stub_agent import SLOW
from support.time_limits import time_limit


def test_only_the_time_beyond_a_usual_look_is_a_pause() -> None:
    watch = PauseWatch()
    assert watch.next_look is None
    assert watch.look(100.0) == 0.0
    assert watch.next_look == 100.0 + COUNTED_S / 2
    assert watch.look(100.0 + COUNTED_S) == 0.0
    assert watch.look(160.0 + 2 * COUNTED_S) == 60.0
    watch.rest()
    assert watch.next_look is None
    assert watch.look(5000.0) == 0.0
    watch.begin(5060.0)
    assert watch.look(5060.0 + COUNTED_S) == 60.0, "begin() changes nothing while a deadline runs"


def test_a_pause_before_the_first_look_is_found(make_executor, monkeypatch) -> None:
    """The process is paused before the first poll after the start, and before the first poll after an idle period."""
    hour, monotonic = 3600.0, time.monotonic
    executor = make_executor(f"serving_config.agent_start_timeout_s={hour / 4}")
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + hour)
    events_until(executor, AgentReady)
    executor.poll(0)
    executor.submit(prefill(0, SLOW))
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 2 * hour)
    [result] = results(executor, 1)
    assert result.error is None


def test_a_paused_server_does_not_lose_an_agent_that_works(tmp_path: Path) -> None:
    """The process of the executor is paused while an agent sleeps in a step, and then together with its agent."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-m", "support.paused_executor", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            for pause_s in (2 * GRACE_S, 1.1 * STEP_TIMEOUT_S):
                # WEXITED: the test does not hang if the program ends without a stop.
                change = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                assert change is not None
                assert change.si_code == os.CLD_STOPPED
                time.sleep(pause_s)
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline() == "result\n"
            assert process.wait(time_limit(20.0)) == 0
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
