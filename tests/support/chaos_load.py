"""A mixed load for chaos runs.

Every answer is compared with the text that the same request got when no fault was active.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUEST_TIMEOUT_S = 240.0
PAUSE_AFTER_ERROR_S = 0.25
Texts = tuple[str, ...]
"""The texts of all choices of an answer."""
_PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}


def _completion(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, **fields}


def _chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 50, **fields}


REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    _completion("Once upon a time", temperature=0),
    _completion("The dog", temperature=0, stream=True),
    _completion("One day, a girl", temperature=0.9, seed=11),
    _completion("There was a bird", temperature=1.0, seed=12, top_p=0.9, stream=True),
    _completion("Once upon a time there was a fox. " * 12, temperature=0, max_tokens=90),
    _completion("The cat", temperature=0.8, seed=13, n=2),
    _completion("A big tree", temperature=0, presence_penalty=0.7, max_tokens=110),
    _completion("Tom and Sam", temperature=0, logprobs=2),
    _chat("Who are you?", temperature=0),
    _chat("Tell me a story about a dog.", temperature=0, stream=True),
    _chat("What is a bird?", temperature=0.7, seed=14),
    _completion("Once", temperature=0, max_tokens=200, stream=True),
    _completion("one two three, one two three, one two three, one two", temperature=0),
    _completion("A person:", temperature=0, response_format=_JSON, ignore_eos=False),
)


@dataclass(frozen=True)
class Answer:
    """The end of one request: its texts, or the status and message of an error. Status 0 means no response."""

    number: int
    began: float
    ended: float
    texts: Texts = ()
    error: str = ""
    status: int = 200


def ask(url: str, number: int, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
    """Sends one request of ``REQUESTS`` and waits for its end."""
    path, body = REQUESTS[number]
    began = time.monotonic()
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            texts, error = _texts_of(response.read(), streamed=bool(body.get("stream")))
        return Answer(number, began, time.monotonic(), texts, error, 200)
    except urllib.error.HTTPError as problem:
        with problem:
            return Answer(number, began, time.monotonic(), (), _message(problem.read()), problem.code)
    except (OSError, ValueError) as problem:
        return Answer(number, began, time.monotonic(), (), f"no response: {problem!r}", 0)
    except Exception as problem:  # http.client raises exceptions of its own if a response ends early
        return Answer(number, began, time.monotonic(), (), f"broken response: {problem!r}", 0)


def _texts_of(data: bytes, *, streamed: bool) -> tuple[Texts, str]:
    """Returns the text of each choice in a response, and the message of an error event if there is one."""
    parts = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")] if streamed else [data]
    texts: dict[int, str] = {}
    for part in parts:
        if part == b"[DONE]":
            return tuple(texts[index] for index in sorted(texts)), ""
        value = json.loads(part)
        if "error" in value:
            return (), str(value["error"]["message"])
        for choice in value["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or message.get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    if streamed:
        return (), "the stream ended without [DONE]"
    return tuple(texts[index] for index in sorted(texts)), ""


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"no error body: {data[:80]!r}"


def undisturbed(url: str) -> list[Answer]:
    """Sends each request of ``REQUESTS`` alone. Returns the answers, which must have no errors."""
    answers = [ask(url, number) for number in range(len(REQUESTS))]
    assert all(not answer.error for answer in answers), answers
    return answers


@dataclass
class ChaosLoad:
    """Clients that send one request after another until the end.

    ``pause`` lets each client finish its request and wait.
    """

    url: str
    seed: int
    num_clients: int = 4
    reference: list[Texts] | None = None
    """The texts of another server. The texts of this server must be the same."""
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = undisturbed(self.url)
        self.expected = [answer.texts for answer in first]
        assert self.reference is None or self.expected == self.reference, "the servers differ without any fault"
        self.step_s = max(
            (answer.ended - answer.began) / body["max_tokens"]
            for answer, (_, body) in zip(first, REQUESTS, strict=True)
        )
        """Time of a step in seconds, measured before the first fault. It includes the overhead of the server on this
        machine.
        """
        self._ended, self._running = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._waiting = 0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(self.num_clients)]
        self._running.set()

    def __enter__(self) -> ChaosLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Ends the load. Waits for the requests that still run, unless the ``with`` block has failed."""
        self._ended.set()
        self._running.set()
        for thread in self._threads if kind is None else ():
            thread.join(REQUEST_TIMEOUT_S)

    @property
    def num_hung(self) -> int:
        """The number of clients that still wait for a response after the end of the load."""
        return sum(thread.is_alive() for thread in self._threads) if self._ended.is_set() else 0

    def pause(self, timeout_s: float) -> bool:
        """Lets every client finish its request and then wait. Returns False if a client has not finished in time."""
        self._running.clear()
        deadline = time.monotonic() + timeout_s
        while self._waiting < self.num_clients and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._waiting == self.num_clients

    def resume(self) -> None:
        self._running.set()

    def is_equal(self, answer: Answer) -> bool:
        """Returns True if an answer is an error, or if its texts are those that the request got when no fault was
        active.
        """
        return bool(answer.error) or answer.texts == self.expected[answer.number]

    def _run(self, client: int) -> None:
        rng = random.Random(f"client {self.seed} {client}")
        while not self._ended.is_set():
            with self._lock:
                self._waiting += 1
            self._running.wait()
            with self._lock:
                self._waiting -= 1
            if self._ended.is_set():
                return
            answer = ask(self.url, rng.randrange(len(REQUESTS)))
            with self._lock:
                self.answers.append(answer)
            if answer.error:
                time.sleep(PAUSE_AFTER_ERROR_S)
