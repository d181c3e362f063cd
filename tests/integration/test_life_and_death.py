"""Kills a part of the server. The engine recovers, texts do not change, and no process or file is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request

import psutil
import pytest

from llm_serving.server.error_replies import FAILURE_TEXTS
from support.poisoned_agent import POISON
from support.server_process import ServerProcess, running_server, shm_entries, stream_events
from support.time_limits import time_limit

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SHORT = LONG | {"max_tokens": 20}
SLOW = LONG | {"max_tokens": 1500}


@pytest.fixture
def shallow(shallow_model):
    """Returns the setting for the shallow model. Most tests of this file only compare texts of the same model with each
    other.
    """
    return f"model_config.model_path={shallow_model}"


def ids_of(answer):
    assert "choices" in answer, answer
    return answer["choices"][0]["token_ids"]


def ids_of_stream(content):
    """Returns the token ids of a complete stream. An error event raises KeyError."""
    return [token for event in stream_events(content) for token in event["choices"][0]["token_ids"]]


def seconds_until_not_ready(server):
    """Returns the seconds until the server does not say that it is ready."""
    start = time.monotonic()
    with contextlib.suppress(OSError, http.client.HTTPException):  # a 503 and a closed connection are an OSError
        while time.monotonic() - start < time_limit(20.0):
            server.get("/health/ready")
            time.sleep(0.01)
    return time.monotonic() - start


def failed_or_complete(body, tokens):
    return len(ids_of(body)) == tokens if "choices" in body else body["status"] >= 500


def wait_for(condition, timeout_s=None):
    deadline = time.monotonic() + (timeout_s or time_limit(20.0))
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_a_killed_agent_is_replaced_and_requests_in_flight_end_with_the_same_text(tmp_path, shallow):
    with running_server(tmp_path, [shallow]) as server:
        expected = ids_of(server.post("/v1/completions", LONG))
        assert len(expected) == 400
        [agent] = server.agents()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(4)]
            wait_for(lambda: server.get("/server_info")["engine"]["running"] == 4)
            agent.kill()
            wait_for(lambda: server.events("agent_lost"))
            assert "signal 9" in server.events("agent_lost")[0]["message"], "the server was told of the end"
            assert [ids_of(answer.result()) for answer in answers] == [expected] * 4
        assert "INFO agent_ready: An agent has loaded, compiled and warmed up." in server.stderr()
        assert [event for event in server.events("request_end") if event["finish_reason"] == "error"] == []
        [replacement] = server.agents()
        assert replacement.pid != agent.pid
        server.wait_until_idle()


def test_an_agent_that_cannot_come_back_ends_requests_with_a_clear_error(tmp_path, shallow):
    with running_server(tmp_path, [shallow, "serving_config.agent_restart_limit=0"]) as server:
        [agent] = server.agents()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/completions", LONG)
            wait_for(lambda: server.get("/server_info")["engine"]["running"] == 1)
            agent.kill()
            body = answer.result()
        assert body["status"] >= 500
        assert body["error"]["message"] == FAILURE_TEXTS[body["error"]["code"]]
        assert "agent 0" in server.events("request_failed")[0]["message"]
        assert server.wait_end() == 1
        assert "error: the server stopped: the agent was lost" in server.stderr()


@pytest.mark.parametrize("part", ["engine", "thread", "http"])
def test_a_server_of_which_a_part_dies_ends_with_an_error_code(tmp_path, shallow, part, record_property):
    trigger = tmp_path / "fail"
    server = ServerProcess(tmp_path, [shallow], faulty=[part, str(trigger)]).wait_ready()
    with contextlib.ExitStack() as owned:
        owned.callback(server.stop)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 1500})
            wait_for(lambda: server.get("/server_info")["engine"]["running"] == 1)
            trigger.touch()
            record_property("falsely_ready_s", seconds_until_not_ready(server))
            assert server.wait_end() == 1
            with contextlib.suppress(OSError, ValueError):  # the HTTP server has failed and may have sent no response
                assert failed_or_complete(answer.result(), 1500)  # the response may end before the part fails
        assert "error: the" in server.stderr()
        assert server.events("server_failed")


def test_of_many_streams_only_the_request_that_kills_its_agent_fails(tmp_path, shallow):
    """No stream loses or repeats a token, although all clients have received tokens before the loss."""
    settings = [shallow, "model_config.decode_batch_size=[9]", "pa_config.num_blocks=1024"]
    settings += ["speculative_config.method=off"]  # so that a text has a step for each token
    server = ServerProcess(tmp_path, settings, faulty=["poison", str(tmp_path / "none")]).wait_ready()
    with contextlib.ExitStack() as owned:
        owned.callback(server.stop)
        bodies = [LONG | {"prompt": [1, 300 + index], "max_tokens": 500} for index in range(8)]
        expected = [ids_of(server.post("/v1/completions", body)) for body in bodies]
        received = [bytearray() for _ in bodies]
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            streams = [
                pool.submit(server.stream, "/v1/completions", body, content)
                for body, content in zip(bodies, received, strict=True)
            ]
            wait_for(lambda: all(received))
            poisoned = pool.submit(server.post, "/v1/completions", LONG | {"prompt": [1, *POISON]})
            assert poisoned.result()["error"]["code"] == "agent_lost_twice"
            assert [stream.result() for stream in streams] == [None] * 8
        assert [ids_of_stream(content) for content in received] == expected
        assert len(server.events("agent_lost")) == 2
        lost = server.events("agent_lost")[0]["time"]
        ends = [event["time"] for event in server.events("request_end") if event["finish_reason"] == "length"]
        assert sum(end > lost for end in ends) == 8, "streams ended before the loss"
        server.wait_until_idle()


def test_a_restart_goes_on_while_agents_cannot_start(tmp_path, shallow):
    """The server keeps restarting its agents while their log file cannot be written, and serves again when it can."""
    with running_server(tmp_path, [shallow, "scheduler_config.max_num_seqs=4"]) as server:
        expected = ids_of(server.post("/v1/completions", SHORT))
        log = tmp_path / "agent_0.log"
        log.unlink()
        log.mkdir()
        [agent] = server.agents()
        agent.kill()
        wait_for(lambda: len(server.events("agent_lost")) >= 3)
        assert server.get("/health/live") == {"status": "live"}
        log.rmdir()
        wait_for(lambda: len(server.events("agent_ready")) == 2)
        assert ids_of(server.post("/v1/completions", SHORT)) == expected


def test_after_a_signal_new_requests_get_a_503_and_running_ones_complete(tmp_path, shallow, record_property):
    server = ServerProcess(tmp_path, [shallow]).wait_ready()
    begin = ids_of(server.post("/v1/completions", LONG))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", SLOW)
        wait_for(lambda: server.get("/server_info")["engine"]["running"] == 1)
        os.kill(server.pid, signal.SIGTERM)
        wait_for(lambda: server.events("server_stop"))
        refused = server.post("/v1/completions", SHORT)
        assert (refused["status"], refused["error"]["code"]) == (503, "stopping")
        assert "stopping: running requests have 30 s; a second signal ends them now" in server.stderr()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/health/ready")
        tokens = ids_of(answer.result())
        record_property("lost_tokens", f"{SLOW['max_tokens'] - len(tokens)} of {SLOW['max_tokens']}")
        assert (len(tokens), tokens[: len(begin)]) == (SLOW["max_tokens"], begin)
    assert server.wait_end() == 0
    assert server.stop() == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path, shallow):
    server = ServerProcess(tmp_path, [shallow, "serving_config.drain_timeout_s=600"]).wait_ready()
    agents = server.agents()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", SLOW)
        wait_for(lambda: server.get("/server_info")["engine"]["running"] == 1)
        os.kill(server.pid, signal.SIGTERM)
        wait_for(lambda: server.events("server_stop"))
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_end() == 128 + signal.SIGINT
        with pytest.raises((OSError, http.client.HTTPException)):  # the server closed the connection
            answer.result()
    _, alive = psutil.wait_procs(agents, timeout=time_limit(5.0))
    assert alive == []
    server.stop()


def test_running_streams_end_with_an_error_event_when_the_drain_time_is_over(tmp_path, shallow):
    server = ServerProcess(tmp_path, [shallow, "serving_config.drain_timeout_s=0"]).wait_ready()
    body = json.dumps(SLOW | {"stream": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=time_limit(30)) as response:
        assert response.readline().startswith(b"data: {")
        os.kill(server.pid, signal.SIGTERM)
        *_, error, done = [line for line in response.read().splitlines() if line]
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert done == b"data: [DONE]"
    assert server.wait_end() == 0
    assert server.stop() == 0


def test_agents_end_within_five_seconds_of_a_killed_server(tmp_path, shallow, record_property):
    server = ServerProcess(tmp_path, [shallow], forks=False).wait_ready()
    [agent] = server.agents()
    killed = time.monotonic()
    os.kill(server.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([agent], timeout=time_limit(5.0))
    record_property("agents_end_s", time.monotonic() - killed)
    assert alive == []
    assert shm_entries(server.pid) == set()
    assert server.stop() == -signal.SIGKILL


def test_the_next_start_removes_what_a_server_killed_in_its_start_has_left(tmp_path, shallow):
    (tmp_path / "killed").mkdir()
    killed = ServerProcess(tmp_path / "killed", [shallow], forks=False)
    wait_for(lambda: shm_entries(killed.pid))
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait_end() == -signal.SIGKILL
    # A server of another test may start earlier, and then removes these segments before this server can.
    with running_server(tmp_path, [shallow]):
        assert shm_entries(killed.pid) == set()
    killed.stop()


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)])
def test_a_signal_under_load_stops_everything(tmp_path, shallow, with_signal):
    server = ServerProcess(tmp_path, [shallow], forks=False).wait_ready()
    port = int(server.url.rsplit(":", 1)[1])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(2)]
        wait_for(lambda: server.get("/server_info")["engine"]["running"] == 2)
        assert server.stop(with_signal) == 0
        for answer in answers:
            with contextlib.suppress(OSError):  # the server may have closed the connection before the response began
                assert failed_or_complete(answer.result(), 400)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_a_signal_while_starting_stops_everything(tmp_path, shallow):
    server = ServerProcess(tmp_path, [shallow], forks=False)
    wait_for(lambda: server.agents())
    assert server.stop(signal.SIGINT) != 0


def test_a_client_that_goes_away_frees_its_blocks(shallow_server):
    server = shallow_server
    host, port = server.url.removeprefix("http://").split(":")
    num_before = len(server.events("request_end"))
    body = b'{"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "stream": true}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert b"200 OK" in client.recv(4096)
    server.wait_until_idle(timeout_s=2.0)
    [end] = server.events("request_end")[num_before:]
    assert end["finish_reason"] == "abort"
    assert end["output_tokens"] < 1500
