"""A client of one server's OpenAI API: lists its models and streams answers. Uses only the standard library."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from llm_serving.errors import LLMServingError

_MAX_LINE = 16 * 1024 * 1024
"""Maximum bytes of a line of a streamed answer."""
_MAX_ERROR_BODY = 1024 * 1024
"""Maximum bytes that are read from the body of an error response."""
_DONE = b"[DONE]"
DEFAULT_WAIT_S = 600.0
"""Maximum seconds to wait for a server whose model still loads."""
_POLL_S = 1.0
"""Seconds between two attempts while the server's model loads."""
_LOADING_CODES = frozenset({"starting", "recovering"})
"""Codes of the server's errors with status 503 that end by themselves: the agents load the model, at first or again."""


class ChatError(LLMServingError):
    """Raised if no server responds, or if the server refuses a request. The text is shown to the user."""


class LoadingError(ChatError):
    """Raised if the server refuses a request because its model still loads."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of an answer: a piece of text, or at the end the number of output tokens and the finish reason."""

    text: str = ""
    tokens: int | None = None
    finish_reason: str | None = None
    is_reasoning: bool = False
    """True if the text is part of the model's reasoning. The conversation of later requests does not include reasoning.
    """


class ChatClient:
    """Sends conversations to one server. ``url`` is the server's address, with or without ``/v1``.

    If the server's model still loads, the client waits up to ``wait_s`` seconds and says so on standard error.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = 600.0, *, wait_s: float = DEFAULT_WAIT_S
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._port = parts.port
        except ValueError as reason:
            raise ChatError(f"--url {url}: {reason}") from reason
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url {url}: expected http://HOST:PORT or https://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._is_tls = parts.hostname, parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Returns the names of the server's models. Raises ChatError if no server responds."""
        connection = self._connection()
        try:
            body = self._json(self._send(connection, "GET", "/models"))
            return [str(model["id"]) for model in body["data"]]
        except (KeyError, TypeError) as reason:
            raise ChatError(f"{self.url} does not list its models; is it a server with the OpenAI API?") from reason
        finally:
            connection.close()

    def stream(
        self, model: str, messages: Sequence[dict[str, str]], options: dict[str, Any]
    ) -> Generator[Piece, None, None]:
        """Yields the pieces of the next answer. If the caller closes the iterator, the connection is closed, and the
        server stops generating.

        Raises ChatError if the server refuses the conversation or ends the answer with an error.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        connection = self._connection()
        try:
            response = self._send_when_loaded(connection, "/chat/completions", json.dumps(body).encode())
            for event in _events(response):
                yield from _pieces(event)
        except (OSError, http.client.HTTPException) as reason:
            raise ChatError(f"the connection to {self.url} was lost: {reason}") from reason
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def _send_when_loaded(
        self, connection: http.client.HTTPConnection, path: str, body: bytes
    ) -> http.client.HTTPResponse:
        """Sends a POST request, again and again while the server's model loads. Returns the response.

        Raises ChatError if the model still loads after the maximum wait, or if the server refuses the request.
        """
        end, is_told = time.monotonic() + self._wait_s, False
        while True:
            try:
                return self._send(connection, "POST", path, body)
            except LoadingError as error:
                connection.close()
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise ChatError(f"{error} The chat has waited {self._wait_s:g} s (--wait).") from error
                if not is_told:
                    sys.stderr.write(f"the model still loads; waiting up to {self._wait_s:g} s, Ctrl-C stops\n")
                    sys.stderr.flush()
                    is_told = True
                time.sleep(min(_POLL_S, remaining))

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Sends a request and returns its response.

        Raises ChatError with the server's message unless the status is 200. If the model still loads, this error is a
        LoadingError.
        """
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as reason:
            is_refused = isinstance(reason, ConnectionRefusedError)
            text = "connection refused" if is_refused else str(reason)
            raise ChatError(f"no server responds at {self.url}: {text}") from reason
        if response.status != http.client.OK:
            text, is_loading = _error_text(response)
            raise (LoadingError if is_loading else ChatError)(f"{self.url}: {text}")
        return response

    def _json(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read(_MAX_ERROR_BODY))
        except ValueError as reason:
            raise ChatError(f"{self.url} sends no JSON; is it a server with the OpenAI API?") from reason


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yields the JSON of each event of a stream."""
    while line := response.readline(_MAX_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == _DONE:
            return
        try:
            yield json.loads(data)
        except ValueError as reason:
            raise ChatError(f"the server sent an event that is not JSON: {data[:80]!r}") from reason
    raise ChatError("the server closed the connection before the end of the answer")


def _pieces(event: Any) -> Iterator[Piece]:
    """Yields the pieces of one event. Raises ChatError if the event is an error or has an unknown form."""
    try:
        if (error := event.get("error")) is not None:
            raise ChatError(str(error["message"]))
        for choice in event["choices"]:
            if thought := choice["delta"].get("reasoning_content"):
                yield Piece(thought, is_reasoning=True)
            text, reason = choice["delta"].get("content"), choice.get("finish_reason")
            if text or reason:
                yield Piece(text or "", finish_reason=reason)
        if (usage := event.get("usage")) is not None:
            yield Piece(tokens=int(usage["completion_tokens"]))
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise ChatError(f"the server sent an event of an unknown form: {str(event)[:80]}") from reason


def _error_text(response: http.client.HTTPResponse) -> tuple[str, bool]:
    """Returns the message of an error response, and whether the reason is that the model still loads."""
    body = response.read(_MAX_ERROR_BODY)
    try:
        error = json.loads(body)["error"]
        text, code = f"{response.status}: {error['message']}", error.get("code")
    except (AttributeError, ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason}", False
    return text, response.status == http.client.SERVICE_UNAVAILABLE and code in _LOADING_CODES
