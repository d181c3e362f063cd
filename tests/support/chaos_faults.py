"""The faults of a chaos run.

The rig injects each fault into a real server and waits until the server has recovered.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llm_serving.engine.receipts import RECENT_RECEIPTS
from support.chaos_load import REQUESTS, Answer, ChaosLoad, ask
from support.fault_module.sitecustomize import DEADLY
from support.server_process import ServerProcess
from support.time_limits import time_limit

DETECTION_LIMIT_S = {"kill": 1.0, "stop": 2.0, "corrupt": 2.0}
"""Maximum time until a lost agent is detected, without the time of ``DETECTION_STEPS`` steps."""
DETECTION_STEPS = 5
RECOVERY_LIMIT_S = 180.0
_POLL_S = 0.02
_HELD_S = 2.0
"""Time for which a resource limit or a flood of requests lasts, in seconds."""
_FLOOD_CLIENTS = 60
_MANY_CHOICES = 16
_STREAM = b'{"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true}'


@dataclass(frozen=True)
class Injection:
    """One fault of the schedule. Its agent is the one with rank ``rank``.

    ``order`` names the variant of the fault. ``gap_s`` is the pause after the fault, in seconds.
    """

    kind: str
    rank: int
    order: str
    gap_s: float


@dataclass(frozen=True)
class Outcome:
    """The times of one fault, as values of ``time.monotonic``.

    ``detected_s`` is None if there was nothing to detect.
    """

    injection: Injection
    began: float
    ended: float
    detected_s: float | None
    recovered_s: float
    pause_s: float = 0.0
    """The growing pause before the restart of a group that was lost before. It is part of ``recovered_s``."""
    problem: str = ""


LOSES_AGENT = ("kill", "stop", "corrupt", "query")
"""Faults after which the agent must be lost and replaced."""
MAY_REFUSE = {
    "kill": (503,),
    "stop": (503,),
    "corrupt": (503,),
    "flood": (429, 503),
    "descriptors": (0, 503),
    "memory": (0, 500, 503),
}
"""HTTP statuses that each fault may cause. An error event in a stream counts as 503. Other faults may cause no error.
"""
_ORDERS = {
    "corrupt": ("flip", "truncate", "duplicate", "huge"),
    "delay": ("0.3", "0.8"),
    "memory": ("4", "16", "60"),
    "reload": ("", "drain"),
}
KINDS = (
    *("kill", "stop", "delay", "corrupt", "disconnect", "flood", "descriptors", "memory", "disk", "query"),
    *("reload", "profile"),
)


def schedule(seed: int, num_agents: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Injection]:
    """Yields faults without end. Each round has every kind of fault once, in random order.

    The same seed gives the same faults.
    """
    rng = random.Random(f"schedule {seed}")
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            order = rng.choice(_ORDERS.get(kind, ("",)))
            yield Injection(kind, rng.randrange(num_agents), order, rng.uniform(0.5, 2.5))


class FaultRig:
    """Injects faults into a server under a load. The fault module in the agents reads its orders from ``folder``."""

    def __init__(self, server: ServerProcess, folder: Path, load: ChaosLoad) -> None:
        self._server, self._folder, self._load = server, folder, load
        self._port = int(server.url.rsplit(":", 1)[1])
        self.extra_answers: list[Answer] = []
        """Responses to the requests that a fault itself sends."""

    def inject(self, injection: Injection) -> Outcome:
        """Injects one fault and waits until the server has recovered from it."""
        restarts, num_losses = self._restarts(), len(self._server.events("agent_lost"))
        began = time.monotonic()
        problem, detected = "", None
        try:
            _INJECTORS[injection.kind](self, injection)
            if injection.kind in LOSES_AGENT:
                limit_s = self._detection_limit_s(injection.kind)
                self._wait(lambda: self._restarts() != restarts, limit_s, "the fault was not detected")
                detected = time.monotonic() - began
            released = time.monotonic()
            self._wait(self._is_recovered, RECOVERY_LIMIT_S, "the server did not recover")
        except AssertionError as error:
            problem, released = str(error), time.monotonic()
        self._undo(injection)
        ended = time.monotonic()
        recovered = ended - (began if detected is not None else released)
        pause = 0.0 if detected is None else self._pause_s(num_losses)
        return Outcome(injection, began, ended, detected, recovered, pause, problem)

    def agents(self) -> list[dict[str, Any]]:
        """Returns the agents in order of rank, as ``/server_info`` describes them."""
        found: list[dict[str, Any]] = self._server.get("/server_info")["engine"]["agents"]
        return sorted(found, key=lambda agent: agent["rank"])

    def _restarts(self) -> list[int]:
        return [agent["restarts"] for agent in self.agents()]

    def _detection_limit_s(self, kind: str) -> float:
        """Returns the maximum seconds until a fault of this kind must be detected, on this machine with its present
        load.
        """
        return time_limit(DETECTION_LIMIT_S.get(kind, 0.0) + DETECTION_STEPS * self._load.step_s)

    def _pause_s(self, num_before: int) -> float:
        """Returns the seconds that a replica has paused before restarts, summed over its losses. Returns the largest
        sum of all replicas.

        The log states the pause of each loss. The first ``num_before`` losses do not count.
        """
        pauses: dict[int, float] = defaultdict(float)
        for event in self._server.events("agent_lost")[num_before:]:
            match = re.search(r"in ([0-9.]+) s$", event["message"])
            pauses[event.get("replica", 0)] += float(match[1]) if match else 0.0
        return max(pauses.values(), default=0.0)

    def _is_recovered(self) -> bool:
        """Returns True if all agents are ready and a request gets its expected text."""
        try:
            if any(agent["state"] != "ready" for agent in self.agents()):
                return False
        except OSError:
            return False
        answer = ask(self._server.url, 0, timeout_s=time_limit(20.0))
        return answer.texts == self._load.expected[0]

    def _wait(self, condition: Callable[[], bool], limit_s: float, message: str) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{message} within {limit_s:g} s")
            time.sleep(_POLL_S)

    def _pid(self, injection: Injection) -> int:
        pid = self.agents()[injection.rank]["pid"]
        assert isinstance(pid, int), "the agent has no process"
        return pid

    def _kill(self, injection: Injection) -> None:
        os.kill(self._pid(injection), signal.SIGKILL)

    def _stop(self, injection: Injection) -> None:
        os.kill(self._pid(injection), signal.SIGSTOP)

    def _delay(self, injection: Injection) -> None:
        (self._folder / str(self._pid(injection))).write_text(f"delay {injection.order}")
        time.sleep(_HELD_S)
        self._undo(injection)

    def _corrupt(self, injection: Injection) -> None:
        (self._folder / str(self._pid(injection))).write_text(injection.order)

    def _disconnect(self, injection: Injection) -> None:
        """Starts some streams, then resets their connections."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        clients = []
        for _ in range(12):
            client = socket.create_connection(("127.0.0.1", self._port), timeout=20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(_STREAM), _STREAM))
            clients.append(client)
        time.sleep(0.3)
        for client in clients:
            client.close()

    def _flood(self, injection: Injection) -> None:
        """Sends many requests at the same time. Each must get its expected text or a refusal."""
        threads = [threading.Thread(target=self._ask_one, args=(n % len(REQUESTS),)) for n in range(_FLOOD_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask_one(self, number: int) -> None:
        self.extra_answers.append(ask(self._server.url, number))

    def _descriptors(self, injection: Injection) -> None:
        """Limits the server to three more file descriptors and connects to it many times."""
        soft = psutil.Process(self._server.pid).num_fds() + 3
        with self._limited(resource.RLIMIT_NOFILE, soft), contextlib.ExitStack() as held:
            for _ in range(50):
                client = held.enter_context(socket.socket())
                client.settimeout(1.0)
                with contextlib.suppress(OSError):
                    client.connect(("127.0.0.1", self._port))
            time.sleep(_HELD_S)

    def _memory(self, injection: Injection) -> None:
        """Limits the server to a few more MiB of address space, and sends it large bodies."""
        soft = psutil.Process(self._server.pid).memory_info().vms + int(injection.order) * 2**20
        with self._limited(resource.RLIMIT_AS, soft):
            self.send_large_bodies()
            time.sleep(_HELD_S / 2)

    def send_large_bodies(self) -> None:
        """Sends three large bodies, which the server refuses.

        The server keeps the memory of the first bodies for later ones, so this memory does not count as a leak.
        """
        body = b'{"prompt": "' + b"a " * 3_000_000 + b'"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(3):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 5) as client:
                client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                client.recv(4096)

    def fill_receipts(self) -> None:
        """Sends as many requests as the server keeps receipts of. Later receipts then take the memory of earlier ones.
        """
        body = {"prompt": "a", "max_tokens": 1, "n": _MANY_CHOICES}
        for _ in range(RECENT_RECEIPTS // _MANY_CHOICES):
            answer = self._server.post("/v1/completions", body)
            assert "choices" in answer, f"a request got {answer!r:.200}"

    def _disk(self, injection: Injection) -> None:
        """Prevents the server's files from growing, as on a full disk."""
        with self._limited(resource.RLIMIT_FSIZE, max(1, self._server.log.stat().st_size)):
            time.sleep(_HELD_S)

    @contextlib.contextmanager
    def _limited(self, kind: int, soft: int) -> Iterator[None]:
        """Sets a resource limit of the server, and restores the old limit at the end of the context."""
        before = resource.prlimit(self._server.pid, kind)
        resource.prlimit(self._server.pid, kind, (soft, before[1]))
        try:
            yield
        finally:
            resource.prlimit(self._server.pid, kind, before)

    def _query(self, injection: Injection) -> None:
        """Sends a request that kills its agent each time (a query of death).

        The server must end this request with an error.
        """
        body = {"prompt": [1, *DEADLY], "max_tokens": 4}
        answer = self._server.post("/v1/completions", body, timeout_s=RECOVERY_LIMIT_S)
        assert answer.get("error", {}).get("code") == "agent_lost_twice", f"the request got {answer!r:.200}"

    def _reload(self, injection: Injection) -> None:
        """Reloads the weights of the model, and waits until the agents of the old version have ended.

        With the order ``drain``, the old version ends before the new one starts.
        """
        model, num_agents = self._server.get("/v1/models")["data"][0]["id"], len(self.agents())
        body = {"drain_first": injection.order == "drain"}
        answer = self._server.post(f"/v1/models/{model}/reload", body, timeout_s=RECOVERY_LIMIT_S)
        assert answer.get("state") == "ready", f"the reload got {answer!r:.200}"
        self._wait(lambda: self._num_processes() == num_agents, RECOVERY_LIMIT_S, "the old agents did not end")

    def _num_processes(self) -> int:
        """Returns the number of agent processes, or -1 if one of them ends during the count."""
        try:
            return len(self._server.agents())
        except psutil.Error:
            return -1

    def _profile(self, injection: Injection) -> None:
        """Makes a profile of all agents under the load."""
        answer = self._server.post("/profile/start", {"max_seconds": 600}, timeout_s=RECOVERY_LIMIT_S)
        assert "status" not in answer, f"the start of a profile got {answer!r:.200}"
        time.sleep(_HELD_S)
        answer = self._server.post("/profile/stop", {}, timeout_s=2 * RECOVERY_LIMIT_S)
        agents = answer.get("agents", ())
        assert len(agents) == len(self.agents()), f"the end of a profile got {answer!r:.200}"
        assert any(agent["steps"] for agent in agents), f"the profile has no steps: {answer!r:.200}"

    def _undo(self, injection: Injection) -> None:
        for order in self._folder.iterdir():
            if order.name.isdigit():  # an order for an agent
                order.unlink(missing_ok=True)


_INJECTORS: dict[str, Callable[[FaultRig, Injection], None]] = {
    "kill": FaultRig._kill,
    "stop": FaultRig._stop,
    "delay": FaultRig._delay,
    "corrupt": FaultRig._corrupt,
    "disconnect": FaultRig._disconnect,
    "flood": FaultRig._flood,
    "descriptors": FaultRig._descriptors,
    "memory": FaultRig._memory,
    "disk": FaultRig._disk,
    "query": FaultRig._query,
    "reload": FaultRig._reload,
    "profile": FaultRig._profile,
}
