"""Tests ``llm-serving chat`` in a pseudo terminal, with a real server that it starts and with a scripted server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llm_serving.chat.client import ChatClient, ChatError
from llm_serving.chat.conversation import AnswerTimes, Conversation, printable
from llm_serving.chat.main import main
from llm_serving.errors import LLMServingError
from support.chat_terminal import CTRL_C, CTRL_D, chat_terminal
from support.fake_openai_server import Reply, fake_openai_server
from support.processes import has_ended
from support.server_process import shm_entries
from support.small_configs import REPOSITORY, small_overrides
from support.time_limits import time_limit

JAPAN = "What is the capital of Japan?"


def one_shot(url: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return chat("--url", url, *options, text=text)


def chat(*options: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm_serving", "chat", *options]
    return subprocess.run(
        command, input=text, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60)
    )


def test_a_chat_with_a_server_of_its_own(tmp_path: Path) -> None:
    sets = [word for override in small_overrides(tmp_path) for word in ("--set", override)]
    with chat_terminal("--config", "llama_tiny_cpu.yaml", "--temperature", "0", *sets) as terminal:
        url = terminal.expect(r"llama_tiny at (http://127\.0\.0\.1:\d+); .*>>> ").group(1)
        server = psutil.Process(terminal.process.pid).children()[0]
        terminal.type(f"{JAPAN}\n")
        terminal.expect(r"The capital of Japan is Tokyo\.\n\[\d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s\]")
        terminal.expect(">>> ")

        # A second chat connects to the URL of the running server and reads its input from a pipe.
        done = one_shot(url, f"{JAPAN}\n", "--temperature", "0")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("The capital of Japan is Tokyo.\n[")
        done = one_shot(url, "hello\n", "--name", "no-such-model")
        assert done.stderr == f"error: {url} has no model 'no-such-model'; it has llama_tiny\n"

        terminal.type(CTRL_C)  # Ctrl-C at the prompt ends neither the chat nor its server
        terminal.expect(r"Ctrl-D or /quit ends the chat.*>>> ")
        terminal.type("Which month comes after March?\n")
        terminal.expect(r"April comes after March\..*>>> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert has_ended(server)
        assert shm_entries(server.pid) == set()


def test_history_system_prompt_and_options_are_sent() -> None:
    with fake_openai_server(lambda index, body: Reply(tokens=3)) as fake:
        url = f"http://127.0.0.1:{fake.port}/v1"
        with chat_terminal(
            "--url", url, "--system", "Be brief.", "--max-tokens", "7", "--api-key", "secret"
        ) as terminal:
            terminal.type("one\n")
            answer = terminal.expect(r">>> one\n(.*?)\n\[3 tokens, ").group(1)
            terminal.type("two\n/system Be kind.\n/reset\n/system\n/nonsense\nthree\n")
            terminal.expect(
                r"the conversation is empty.*system prompt: Be kind\..*/nonsense is not a command.*\[3 tokens, "
            )
            terminal.expect(">>> ")
            terminal.type("/quit\n")
            assert terminal.wait() == 0
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    answered = {"role": "assistant", "content": answer}
    expected = [
        first,
        [*first, answered, {"role": "user", "content": "two"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "three"}],
    ]
    assert [request["messages"] for request in fake.requests] == expected
    assert {request["max_tokens"] for request in fake.requests} == {7}
    assert all("temperature" not in request for request in fake.requests)
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer secret"}


def test_ctrl_c_stops_an_answer_and_keeps_its_text() -> None:
    with fake_openai_server(lambda index, _: Reply(tokens=1_000_000 if index == 0 else 2, gap_s=0.01)) as fake:
        with chat_terminal("--url", f"http://127.0.0.1:{fake.port}") as terminal:
            terminal.type("go on\n")
            terminal.expect(r">>> go on\n token0")  # the first text of the answer has arrived
            terminal.type(CTRL_C)
            terminal.expect(r"\[first token after [\d.]+ s, stopped\]\n>>> ")
            terminal.type("again\n")
            terminal.expect(r"\[2 tokens, .*>>> ")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
        kept = fake.requests[1]["messages"][1]
        assert kept["role"] == "assistant"
        assert kept["content"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(kind="status", status=400), r"error: http://\S+: 400: come back later"),
        (Reply(kind="drop"), r"\nerror: the server closed the connection before the end of the answer"),
        (Reply(kind="garbage"), r"error: the server sent an event that is not JSON: "),
        (Reply(kind="error"), r"\nerror: "),
    ],
    ids=lambda value: value.kind if isinstance(value, Reply) else "",
)
def test_a_failed_answer_is_not_in_the_conversation(reply: Reply, message: str) -> None:
    with fake_openai_server(lambda index, _: reply if index == 0 else Reply()) as fake:
        client = ChatClient(f"http://127.0.0.1:{fake.port}")
        with pytest.raises(ChatError):
            list(client.stream("fake-model", [{"role": "user", "content": "x"}], {}))
        fake.requests.clear()
        done = one_shot(f"http://127.0.0.1:{fake.port}", "first\nsecond\n")
    assert done.returncode == 0
    assert re.search(message, done.stdout), done.stdout
    assert [len(request["messages"]) for request in fake.requests] == [1, 1]


def test_reasoning_is_shown_and_not_sent_back() -> None:
    with fake_openai_server(lambda index, body: Reply(tokens=2, reasoning="Hm, let me see.")) as fake:
        done = one_shot(f"http://127.0.0.1:{fake.port}/v1", "one\ntwo\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Hm, let me see.\n\n token0 token1\n[2 tokens")
    answer = {"role": "assistant", "content": " token0 token1"}
    messages = [{"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"}]
    assert [request["messages"] for request in fake.requests] == [messages[:1], messages]


def test_without_a_server_the_chat_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = one_shot("http://127.0.0.1:9", "hello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no server responds at http://127.0.0.1:9: connection refused\n")
    command = [sys.executable, "-m", "llm_serving", "chat", "--config", "no-such.yaml"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60))
    assert done.returncode == 2
    assert "no-such.yaml: no such config file" in done.stderr
    assert done.stderr.endswith("error: the server did not start; its message is above\n")


@pytest.mark.parametrize("code", ["starting", "recovering"])
def test_a_chat_waits_while_the_model_loads(code: str) -> None:
    loading = Reply(kind="status", status=503, code=code)
    with fake_openai_server(lambda index, _: loading if index == 0 else Reply(tokens=2)) as fake:
        done = one_shot(f"http://127.0.0.1:{fake.port}", "one\n", "--wait", "60")
    assert (done.returncode, done.stderr) == (0, "the model still loads; waiting up to 60 s, Ctrl-C stops\n")
    assert done.stdout.startswith(" token0 token1\n[2 tokens")
    assert [request["messages"] for request in fake.requests] == [[{"role": "user", "content": "one"}]] * 2


def test_the_wait_for_a_model_has_a_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("llm_serving.chat.client._POLL_S", 0.001)
    messages = [{"role": "user", "content": "one"}]
    with fake_openai_server(lambda index, _: Reply(kind="status", status=503, code="starting")) as fake:
        client = ChatClient(f"http://127.0.0.1:{fake.port}", wait_s=0.1)
        with pytest.raises(ChatError, match=r"come back later The chat has waited 0\.1 s"):
            list(client.stream("fake-model", messages, {}))
        assert len(fake.requests) > 1
        assert capsys.readouterr().err.count("still loads") == 1


@pytest.mark.parametrize("reply", [(503, "overloaded"), (503, None), (429, "starting")])
def test_a_chat_does_not_wait_for_other_errors(reply: tuple[int, str | None]) -> None:
    with fake_openai_server(lambda index, _: Reply(kind="status", status=reply[0], code=reply[1])) as fake:
        with pytest.raises(ChatError, match=rf"{reply[0]}: come back later$"):
            list(ChatClient(f"http://127.0.0.1:{fake.port}").stream("fake-model", [], {}))
        assert len(fake.requests) == 1


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan", "x"])
def test_a_wrong_wait_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--wait={seconds}"])
    assert f"argument --wait: invalid number of seconds: '{seconds}'" in capsys.readouterr().err


def test_host_and_port_stand_for_a_url() -> None:
    with fake_openai_server(lambda index, body: Reply(tokens=2)) as fake:
        done = chat("--port", str(fake.port), text="one\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" token0 token1\n[2 tokens")
    done = chat("--host", "::1", "--port", "9", text="one\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no server responds at http://[::1]:9: ")


@pytest.mark.parametrize("other", [("--url", "http://127.0.0.1:9"), ("--config", "llama_tiny_cpu.yaml")])
def test_a_port_is_not_used_with_a_url_or_with_a_new_server(
    other: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", "9", *other])
    assert caught.value.code == 2
    assert "error: --port is " in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(LLMServingError, match="--url"):
        ChatClient(url)


def test_the_figures_of_an_answer() -> None:
    times = AnswerTimes(sent=10.0)
    assert times.summary(0, "stop") == "no text"
    times.saw_text(10.5)
    assert times.summary(1, "stop") == "1 tokens, first token after 0.50 s"
    times.saw_text(12.5)
    assert times.summary(5, "length") == "5 tokens, 2.0 tokens/s, first token after 0.50 s, cut at the maximum length"
    assert times.summary(None, None) == "first token after 0.50 s, stopped"


def test_an_answer_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\n\tc\x9b日本\u3000") == "a\ufffd[31mb\ufffd\n\tc\ufffd日本\u3000"


def test_a_question_does_not_change_the_history_before_its_answer() -> None:
    conversation = Conversation()
    assert conversation.with_question("q") == [{"role": "user", "content": "q"}]
    assert conversation.history == []
