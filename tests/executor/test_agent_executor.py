"""Tests the executor with real processes, sockets and shared memory. Only the device is a stub."""

import contextlib
import errno
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llm_serving.errors import ConfigError
from llm_serving.executor import vitals
from llm_serving.executor.agent_process import bind_agent_ports
from llm_serving.executor.base import AgentLost, AgentProfiled, AgentReady, AgentStatus
from llm_serving.ipc import messages
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind, StepResult
from support.executor_steps import (
    events_until,
    loss_by_event,
    prefill,
    results,
    shm_entries,
    submit_decode_before_prefill,
)
from support.processes import has_ended
from support.stub_agent import BUSY, COMPILE, DIE, HANG, RAISE, REFUSE, SLOW, SPIN, SPIN_CHILD, stub_token
from support.time_limits import time_limit


def pid_of(executor):
    return executor.agents()[0]["pid"]


def test_starts_runs_steps_and_reports_progress(make_executor):
    stages = []
    executor = make_executor(
        report=lambda rank, stage, done, total: stages.append((rank, stage, done, total)), forks=False
    )
    assert executor.num_free_slots == 0
    [ready] = events_until(executor, AgentReady)
    assert ready.summary["device"] == "stub"
    assert stages == [
        (0, "load weights", 1, 2),
        (0, "load weights", 2, 2),
        (0, "compile", 1, 1),
        (0, "warm up", 1, 1),
    ]
    assert executor.num_free_slots == NUM_SLOTS
    executor.submit(prefill(0, 5, row=3, top_logits=2))
    assert executor.num_free_slots == NUM_SLOTS - 1
    [result] = events_until(executor, StepResult)
    assert result.sampled_ids == [stub_token(1, 3)]
    assert result.tops == [((0, 0.0), (1, -1.0))]
    assert (result.graph_us, result.sample_us) == (11, 22)
    assert executor.num_free_slots == NUM_SLOTS


def test_the_shared_memory_is_unlinked_once_both_ends_have_it(make_executor):
    before = shm_entries()
    executor = make_executor()
    events_until(executor, AgentReady)
    assert shm_entries() == before


@pytest.mark.parametrize(("policy", "order"), [("prefill_first", [0, 2, 1]), ("fcfs", [0, 1, 2])])
def test_a_prefill_overtakes_a_waiting_decode_under_prefill_first_only(make_executor, policy, order):
    executor = make_executor(f"scheduler_config.policy={policy}")
    events_until(executor, AgentReady)
    submit_decode_before_prefill(executor)
    done = []
    while len(done) < 3:
        done += [event.seq for event in executor.poll(5.0)]
    assert done == order


def test_moves_overtake_waiting_steps_and_tell_their_time(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    moves = [BlockMove(MoveKind.COPY, 1, 2), BlockMove(MoveKind.COPY, 3, 4)]
    executor.submit(prefill(0, SLOW))
    executor.submit(prefill(1, 5))
    executor.submit(ScheduledStep(2, StepKind.MOVE, moves=moves))
    done = []
    while len(done) < 3:
        done += executor.poll(5.0)
    assert [event.seq for event in done if event.seq != 0] == [2, 1]
    moved = next(event for event in done if event.seq == 2)
    assert (moved.graph_us, moved.sample_us) == (66, 0)
    assert (moved.sampled_ids, moved.logits, moved.error) == ([], [], None)
    assert executor.num_free_slots == NUM_SLOTS


def test_a_waiting_step_can_be_aborted(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, SLOW))
    executor.submit(prefill(1, 5))
    executor.abort(1)
    results = []
    while len(results) < 2:
        results += executor.poll(5.0)
    assert {result.seq: result.aborted for result in results} == {0: False, 1: True}
    assert executor.num_free_slots == NUM_SLOTS


def test_only_the_newest_command_for_profiles_is_answered(make_executor, tmp_path):
    """The late reply to a start of a profile must not count as the reply to the stop."""
    executor = make_executor()
    assert not executor.profile(None), "the agents are not ready, so no event follows"
    events_until(executor, AgentReady)
    (tmp_path / "file").touch()
    assert executor.profile(str(tmp_path / "file"))
    assert executor.profile(None)
    [profiled] = events_until(executor, AgentProfiled)
    assert [agent["error"] for agent in profiled.agents] == ["agent 0 is not being profiled"]


@pytest.mark.parametrize(
    ("token", "phrase"), [(RAISE, "ZeroDivisionError: something nobody thought of"), (REFUSE, "token 203 is refused")]
)
def test_a_step_that_fails_harms_no_other(make_executor, token, phrase, record_property):
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, token))
    executor.submit(prefill(1, 5))
    results = []
    while len(results) < 2:
        results += executor.poll(5.0)
    assert results[0].error == phrase
    record_property("other_failures", f"{results[1].sampled_ids != [stub_token(1, 0)]:d} of 1")
    assert results[1].sampled_ids == [stub_token(1, 0)]


def test_status_is_answered_while_a_step_runs(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, SLOW))
    executor.request_status()
    events = events_until(executor, AgentStatus)
    assert not any(isinstance(event, StepResult) for event in events)
    [status] = events[-1].agents
    assert status["state"] == "ready"
    assert status["rss_bytes"] > 0


def test_the_end_of_a_killed_agent_is_an_event_and_it_is_started_again(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    first = pid_of(executor)
    executor.submit(prefill(0, HANG))
    os.kill(first, signal.SIGKILL)
    lost = loss_by_event(executor)
    assert not lost.final
    assert "signal 9" in lost.error
    assert "restarting it in 0.25 s" in lost.error
    assert executor.num_free_slots == 0
    events_until(executor, AgentReady)
    assert pid_of(executor) != first
    assert executor.num_free_slots == NUM_SLOTS
    executor.submit(prefill(1, 5))
    [result] = events_until(executor, StepResult)
    assert result.sampled_ids == [stub_token(1, 0)]


def test_an_agent_that_keeps_dying_is_given_up_after_the_limit(make_executor):
    executor = make_executor("serving_config.agent_restart_limit=2")
    for restart in range(3):
        events_until(executor, AgentReady)
        executor.submit(prefill(restart, DIE))
        [lost] = events_until(executor, AgentLost)
    assert lost.final
    assert lost.error.endswith("given up after 2 restarts")
    assert executor.agents()[0]["state"] == "stopped"


def test_a_step_that_takes_too_long_loses_the_agent(make_executor):
    executor = make_executor("serving_config.step_timeout_s=1")
    events_until(executor, AgentReady)
    executor.submit(prefill(0, HANG))
    [lost] = events_until(executor, AgentLost)
    assert "did not answer step 0 within 1 s (serving_config.step_timeout_s)" in lost.error


def test_a_stopped_agent_is_replaced_and_cannot_come_back(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    old = psutil.Process(pid_of(executor))
    old.suspend()
    executor.submit(prefill(0, 5))
    [lost] = events_until(executor, AgentLost)
    assert "agent 0 was stopped (SIGSTOP)" in lost.error
    with contextlib.suppress(psutil.NoSuchProcess):
        old.resume()
    events_until(executor, AgentReady)
    assert has_ended(old)
    executor.submit(prefill(0, 5))
    [result] = events_until(executor, StepResult)
    assert result.sampled_ids == [stub_token(1, 0)]


def test_a_step_that_hangs_is_found_long_before_its_timeout(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, HANG))
    [lost] = events_until(executor, AgentLost)
    assert "have done nothing for 2.0 s in the middle of a step" in lost.error


def look_often(monkeypatch, grace_s):
    """Makes executors look at their agents every 10 ms, and wait for steps ``grace_s`` longer than predicted."""
    monkeypatch.setattr(vitals, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(vitals, "GRACE_S", grace_s)


def run_familiar_steps(executor):
    """Runs enough steps for a prediction of step times. The next step has number 8."""
    events_until(executor, AgentReady)
    for seq in range(8):
        executor.submit(prefill(seq, 5))
        results(executor, 1)


@pytest.fixture
def familiar(make_executor, monkeypatch):
    """Provides an executor whose agent has run enough steps for a prediction, with a short patience."""
    look_often(monkeypatch, grace_s=0.3)
    executor = make_executor()
    run_familiar_steps(executor)
    return executor


@pytest.mark.parametrize("token", [SPIN, SPIN_CHILD])
def test_a_step_that_computes_without_end_is_found_by_its_prediction(familiar, token):
    familiar.submit(prefill(8, token))
    [lost] = events_until(familiar, AgentLost)
    assert re.search(r"computed for 0\.[3-9] s in the middle of a step, which should take 0\.000 s", lost.error)


def test_an_agent_that_compiles_in_a_step_is_not_lost(familiar):
    familiar.submit(prefill(8, COMPILE))
    [result] = results(familiar, 1, 60.0)
    assert result.sampled_ids == [stub_token(1, 0)]
    familiar.submit(prefill(9, SPIN))
    [lost] = events_until(familiar, AgentLost)
    assert "in the middle of a step, which should take" in lost.error, "the result has ended the compilation"


def test_a_first_step_may_compute_for_any_time(make_executor, monkeypatch):
    look_often(monkeypatch, grace_s=0.01)
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, BUSY))
    [result] = results(executor, 1, 60.0)
    assert result.sampled_ids == [stub_token(1, 0)]


@pytest.mark.parametrize("has_processors", [True, False])
def test_a_step_with_the_operators_code_may_compute_for_any_time(make_executor, monkeypatch, has_processors):
    look_often(monkeypatch, grace_s=0.01)
    names = ['model_config.logits_processors=["rules:Rule"]'] if has_processors else []
    executor = make_executor(*names)
    run_familiar_steps(executor)
    executor.submit(prefill(8, BUSY))
    [event] = events_until(executor, StepResult if has_processors else AgentLost)
    assert has_processors or "has computed for" in event.error


def test_an_agent_that_sleeps_for_a_profile_is_not_lost(make_executor, monkeypatch):
    """While MindSpore analyses a profile in another process, steps wait and all threads of the agent sleep."""
    look_often(monkeypatch, grace_s=0.1)
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.profile(None)
    executor.submit(prefill(0, 5))
    profiled, result = events_until(executor, StepResult)
    assert isinstance(profiled, AgentProfiled)
    assert result.sampled_ids == [stub_token(1, 0)]
    executor.submit(prefill(1, HANG))
    [lost] = events_until(executor, AgentLost)
    assert "have done nothing" in lost.error, "after the reply, an agent must not sleep in a step any more"


def test_a_step_that_hangs_is_found_while_a_profile_command_waits_for_it(make_executor, monkeypatch):
    monkeypatch.setattr(vitals, "GRACE_S", 3600.0)
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.submit(prefill(0, HANG))
    num_steps = 0
    while num_steps == 0:  # the agent must have taken the step, or the profile command overtakes it
        executor.request_status()
        num_steps = events_until(executor, AgentStatus)[-1].agents[0]["steps"]
    executor.profile(None)
    monkeypatch.setattr(vitals, "GRACE_S", 0.1)
    [lost] = events_until(executor, AgentLost)
    assert "have done nothing" in lost.error


def test_an_agent_that_gets_little_of_the_processor_is_not_lost(make_executor, monkeypatch):
    """The agent needs 0.1 s of one core, which a busy process of higher priority shares.

    The priority of the agent is 10 steps lower. So the agent gets a tenth of the core, and its step takes about a
    second. With the lowest priority, the agent would get a seventieth of the core, and its step would take minutes
    while other tests run.
    """
    look_often(monkeypatch, grace_s=0.1)
    monkeypatch.setattr(vitals, "STOPPED_S", 0.1)
    looks, threads = [], vitals._threads
    monkeypatch.setattr(vitals, "_threads", lambda pid: looks.append(threads(pid)) or looks[-1])
    executor = make_executor()
    events_until(executor, AgentReady)
    agent, core = psutil.Process(pid_of(executor)), min(os.sched_getaffinity(0))
    for thread in agent.threads():
        os.sched_setaffinity(thread.id, [core])
        os.setpriority(os.PRIO_PROCESS, thread.id, min(19, os.nice(0) + 10))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, [core])
        executor.submit(prefill(0, BUSY))
        [result] = results(executor, 1, 60.0)
    finally:
        busy.kill()
        busy.wait()
    assert result.sampled_ids == [stub_token(1, 0)]
    assert len(looks) > 3, "the executor looks at the agent several times while the agent waits for the core"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("fails-to-load", "the weights are made of cheese"),
        ("dies-while-loading", "about to die"),
    ],
)
def test_a_start_that_fails_is_final_and_says_why(make_executor, name, phrase):
    executor = make_executor(f"model_config.model_name={name}")
    [lost] = events_until(executor, AgentLost)
    assert lost.final
    assert phrase in lost.error


def test_a_start_that_takes_too_long_is_final(make_executor):
    executor = make_executor("model_config.model_name=loads-forever", "serving_config.agent_start_timeout_s=2")
    [lost] = events_until(executor, AgentLost)
    assert lost.final
    assert "was not ready after 2 s (serving_config.agent_start_timeout_s)" in lost.error


def test_wake_is_sticky(make_executor):
    executor = make_executor()
    events_until(executor, AgentReady)
    executor.wake()
    start = time.monotonic()
    limit = time_limit(5.0)
    assert executor.poll(6 * limit) == []
    assert time.monotonic() - start < limit


def has_answer(stranger):
    with contextlib.suppress(OSError):
        return bool(stranger.recv(1))
    return False


def test_strangers_on_the_agents_port_reach_no_agent_and_keep_none_from_starting(make_executor, record_property):
    executor = make_executor()
    events_until(executor, AgentReady)
    host, port = executor.agents()[0]["address"].split(":")
    with contextlib.ExitStack() as owned:
        strangers = [owned.enter_context(socket.socket()) for _ in range(40)]
        for stranger in strangers:  # more connections than the listening socket of the agent can queue
            stranger.setblocking(False)
            stranger.connect_ex((host, int(port)))
        executor.submit(prefill(0, 5))
        [result] = events_until(executor, StepResult)
        assert result.sampled_ids == [stub_token(1, 0)]
        os.kill(pid_of(executor), signal.SIGKILL)
        events_until(executor, AgentLost)
        events_until(executor, AgentReady)
        executor.submit(prefill(1, 5))
        [result] = events_until(executor, StepResult)
        assert result.sampled_ids == [stub_token(1, 0)]
        answered = sum(map(has_answer, strangers))
        record_property("accepted_strangers", f"{answered} of {len(strangers)}")
        assert answered == 0


def test_an_agent_holds_no_listening_socket(make_executor):
    executor = make_executor(forks=False)
    events_until(executor, AgentReady)
    assert [each for each in psutil.Process(pid_of(executor)).net_connections() if each.status == "LISTEN"] == []


def garbage(connection):
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")


def oversized(connection):
    connection.sendall(struct.pack("<I", 2**31))


def second_connect(connection):
    connect = messages.Connect(
        version=1, nonce=b"n" * messages.NONCE_BYTES, proof=b"x" * 32, shm_name="llm-serving-00", num_slots=1
    )
    payload = messages.encode(connect)
    connection.sendall(struct.pack("<I", len(payload)) + payload)


@pytest.mark.parametrize("attack", [garbage, oversized, second_connect])
def test_an_agent_that_cannot_read_its_connection_ends_and_is_replaced(make_executor, attack):
    executor = make_executor()
    events_until(executor, AgentReady)
    attack(executor._group.links[0].process.socket)
    [lost] = events_until(executor, AgentLost)
    assert not lost.final
    events_until(executor, AgentReady)


def test_a_folder_of_the_same_name_in_the_working_directory_is_not_run(make_executor, tmp_path, monkeypatch):
    for package in ("support", "agent"):
        (tmp_path / package).mkdir()
        for module in ("__init__", "__main__", "stub_agent"):
            (tmp_path / package / f"{module}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    executor = make_executor(forks=False)
    events_until(executor, AgentReady)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("function", ["pipe", "pidfd_open"])
def test_a_restart_that_the_system_refuses_is_tried_again(make_executor, monkeypatch, function):
    executor = make_executor()
    events_until(executor, AgentReady)
    with monkeypatch.context() as refusing:

        def refuse(*arguments):
            refusing.undo()
            raise OSError(errno.EMFILE, "Too many open files")

        refusing.setattr(os, function, refuse)
        os.kill(pid_of(executor), signal.SIGKILL)
        events_until(executor, AgentLost)
        [lost] = events_until(executor, AgentLost)
        assert "Too many open files" in lost.error
    assert not lost.final
    events_until(executor, AgentReady)


def test_a_taken_agent_port_is_an_error_that_names_it():
    with bind_agent_ports("127.0.0.1", [0]) as [listener]:
        port = listener.getsockname()[1]
        message = f"agent_ports: cannot listen on 127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=message), bind_agent_ports("127.0.0.1", [port]):
            pass


def test_the_secret_is_in_no_argument_and_no_environment(make_executor):
    executor = make_executor(forks=False)
    events_until(executor, AgentReady)
    secret = executor._group.links[0].process.secret
    process = Path("/proc", str(pid_of(executor)))
    for name in ("cmdline", "environ"):
        content = (process / name).read_bytes()
        assert secret not in content
        assert secret.hex().encode() not in content
