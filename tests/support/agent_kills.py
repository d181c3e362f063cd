"""Kills agents of a server under load, one after the other, and checks how the group and the requests recover."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from llm_serving.executor.agent_states import backoff_after
from support.server_process import ServerProcess
from support.time_limits import time_limit

PROMPTS = ("Once upon a time", "The dog", "One day, a girl", "There was a bird")
MAX_TOKENS = (40, 120, 200)
REQUEST_TIMEOUT_S = 600.0
"""Time limit of a request in seconds. It is long, because a request may survive many kills, and its group serves only
briefly between kills.
"""


@dataclass
class Kill:
    """One kill of an agent. All times are in seconds since the signal was sent."""

    rank: int
    noticed_s: float
    ready_s: float
    backoff_s: float

    @property
    def start_s(self) -> float:
        """The time from the end of the pause before the restart until the group serves again."""
        return self.ready_s - self.backoff_s


@dataclass
class Load:
    """Clients that send one request after another until ``stop`` is called."""

    server: ServerProcess
    num_clients: int = 4
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    """Error messages of the requests that failed."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are neither the expected tokens nor a clear error message."""

    def __post_init__(self) -> None:
        self._expected = {
            (prompt, length): self._ask(prompt, length)["choices"][0]["token_ids"]
            for prompt in PROMPTS
            for length in MAX_TOKENS
        }
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, timeout_s: float = 30.0) -> None:
        """Waits until each client has received another answer, so that the next kill affects other requests.

        A request that loses its agent twice at the same position would fail.
        """
        answered, deadline = self.answered, time.monotonic() + time_limit(timeout_s)
        while self.answered <= answered + self.num_clients:
            assert time.monotonic() < deadline, f"no answer within {timeout_s} s"
            time.sleep(0.01)

    def _run(self, client: int) -> None:
        turn = client
        while not self._stopping.is_set():
            prompt, length = PROMPTS[turn % len(PROMPTS)], MAX_TOKENS[turn % len(MAX_TOKENS)]
            turn += 1
            try:
                answer = self._ask(prompt, length)
            except OSError as error:  # a request without a response counts as a wrong answer
                answer = {"no answer": repr(error)}
            with self._lock:
                self._judge(answer, (prompt, length))

    def _judge(self, answer: dict[str, Any], asked: tuple[str, int]) -> None:
        if "choices" in answer:
            self.answered += 1
            if answer["choices"][0]["token_ids"] != self._expected[asked]:
                self.wrong.append(f"{asked}: {answer['choices'][0]}")
        elif answer.get("status", 0) >= 500 and answer["error"]["message"]:
            self.failed.append(answer["error"]["message"])
        else:
            self.wrong.append(f"{asked}: {answer}")

    def _ask(self, prompt: str, length: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer: dict[str, Any] = self.server.post("/v1/completions", body, timeout_s=REQUEST_TIMEOUT_S)
        return answer


def kill_agent(server: ServerProcess, rank: int, nth: int, timeout_s: float = 120.0) -> Kill:
    """Kills the agent of a rank with SIGKILL and waits until its group serves again.

    ``nth`` is the number of earlier kills.
    """
    agents = {agent["rank"]: agent for agent in engine_of(server)["agents"]}
    restarts, began = agents[rank]["restarts"], time.monotonic()
    os.kill(agents[rank]["pid"], signal.SIGKILL)
    while (agent := agent_of(server, rank))["restarts"] == restarts:
        _check_in_time(began, timeout_s, agent)
    noticed = time.monotonic() - began
    while not is_ready(server, agent_of(server, rank)["replica"]):
        _check_in_time(began, timeout_s, agent_of(server, rank))
    backoff = backoff_after(nth)
    return Kill(rank, noticed, time.monotonic() - began, backoff)


def engine_of(server: ServerProcess) -> dict[str, Any]:
    """Returns the engine's part of ``/server_info``."""
    engine: dict[str, Any] = server.get("/server_info")["engine"]
    return engine


def agent_of(server: ServerProcess, rank: int) -> dict[str, Any]:
    """Returns an agent's part of ``/server_info``."""
    return next(agent for agent in engine_of(server)["agents"] if agent["rank"] == rank)


def is_ready(server: ServerProcess, replica: int) -> bool:
    """Returns True if every agent of a replica is ready."""
    agents = [agent for agent in engine_of(server)["agents"] if agent["replica"] == replica]
    return all(agent["state"] == "ready" for agent in agents)


def _check_in_time(began: float, timeout_s: float, agent: dict[str, Any]) -> None:
    assert time.monotonic() - began < time_limit(timeout_s), f"not back after {timeout_s} s: {agent}"
    time.sleep(0.01)
