"""Draws requests for fuzz tests of the HTTP server.

They are drawn from the OpenAPI document, and some have changed bytes.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from dataclasses import dataclass
from typing import Any

from support.mutations import INTEGERS, TEXTS, mutate_bytes, mutate_value

JSON = "application/json"
BOUNDARY = "fuzz"
"""The boundary text between the parts of a multipart form."""
_REF = "#/components/schemas/"
MAX_TOKENS = 6
"""Output length of drawn requests, so that the run does not wait for texts."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_length")
_PROMPTS = ("Once upon a time", "The dog", "größer 你好 🙂", "a\u0301\u200d", "\ud83d", " " * 200, "<|user|>")
MAX_RESPONSE_BYTES = 4_000_000
PATIENCE_S = 0.2
"""Time in seconds that the client waits for a response to a request without a clear end."""
_EXPECTED_ERRORS = ("deadline_exceeded", "queue_full")
"""Codes of errors with status 500 or above that a correct server may return. A ``deadline_ms`` of a millisecond causes
one of them."""


@dataclass(frozen=True)
class FuzzRequest:
    """The bytes that a client sends on one connection. ``place`` is a short description of where they come from.

    If ``is_whole`` is true, the server can see where the request ends. It must then respond and close the connection.
    """

    place: str
    data: bytes
    is_whole: bool = True


@dataclass(frozen=True)
class FuzzAnswer:
    """The status of the first response and its bytes.

    The status is 0 if the server closed the connection without a response.
    """

    status: int
    body: bytes

    @property
    def is_failure(self) -> bool:
        """True for a status of 500 or more, because the server itself has then failed.

        A full queue and a missed deadline do not count as failures, because a request can cause them.
        """
        return self.status >= 500 and not any(code.encode() in self.body for code in _EXPECTED_ERRORS)


def _encoded(body: Any, media: str) -> bytes:
    """Returns a body as JSON, or as a form with one part for each field. Values of a form are JSON."""
    if media == JSON or not isinstance(body, dict):
        return json.dumps(body).encode("utf-8", "surrogatepass")
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\n\r\n{json.dumps(value)}\r\n'
        for name, value in body.items()
    ]
    return "".join([*parts, f"--{BOUNDARY}--\r\n"]).encode("utf-8", "surrogatepass")


class RequestDrawing:
    """Draws requests for every operation of an OpenAPI document. The same seed gives the same request."""

    def __init__(self, document: dict[str, Any], model: str) -> None:
        self._schemas = document["components"]["schemas"]
        self._model = model
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        """All operations as method, path and description."""

    def draw(self, seed: int) -> FuzzRequest:
        """Returns the request of a seed.

        Half of the bodies fit the schemas. The other half has changed values, and many of these have changed bytes,
        too.
        """
        rng = random.Random(f"http {seed}")
        method, path, operation = rng.choice(self.operations)
        kind = rng.random()
        body = self._body(rng, operation)
        if body is not None and kind > 0.5:
            for _ in range(rng.choice((1, 1, 2, 3))):
                body = mutate_value(rng, body)
        media = next(iter(operation["requestBody"]["content"])) if "requestBody" in operation else JSON
        content = b"" if body is None else _encoded(body, media)
        if kind > 0.75:
            content = mutate_bytes(rng, content)
        data = self._bytes(rng, method, path, operation, content, media)
        if kind > 0.85:
            data = mutate_bytes(rng, data, until=rng.choice((data.index(b"\r\n\r\n"), len(data))))
        return FuzzRequest(f"{method} {path}", data, is_whole=kind <= 0.85)

    def _body(self, rng: random.Random, operation: dict[str, Any]) -> Any:
        if "requestBody" not in operation:
            return None
        [media] = operation["requestBody"]["content"].values()
        schema = media["schema"]
        body = self._value(rng, schema, "body", 0)
        self._bound(body, schema)
        return body

    def _bytes(
        self, rng: random.Random, method: str, path: str, operation: dict[str, Any], content: bytes, media: str
    ) -> bytes:
        names = (self._model, "a", "%2e%2e", "%00", "é", "x" * 300)
        path = re.sub(r"\{\w+\}", lambda _: rng.choice(names), path)
        content_type = media if media == JSON else f"{media}; boundary={BOUNDARY}"
        headers = ["Host: localhost", "Connection: close", f"Content-Type: {content_type}"]
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "header" and rng.random() < 0.1:
                headers.append(f"{parameter['name']}: {rng.choice(INTEGERS) if rng.random() < 0.6 else 'x'}")
        if content and rng.random() < 0.1:
            cut = rng.randrange(len(content))
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (content[:cut], content[cut:]) if each)
            headers.append("Transfer-Encoding: chunked")
            content = chunks + b"0\r\n\r\n"
        elif content or method == "POST":
            headers.append(f"Content-Length: {len(content)}")
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""])
        return head.encode("utf-8", "surrogatepass") + content

    def _bound(self, body: Any, schema: dict[str, Any]) -> None:
        """Limits the number of choices and the length of each output, so that each request ends soon.

        The routes /generate and /chat have their limits in the nested objects ``parameters`` and ``gen_kwargs``.
        """
        if not isinstance(body, dict):
            return
        known = self._schemas[schema["$ref"].removeprefix(_REF)].get("properties", {}) if "$ref" in schema else {}
        for name in _LENGTHS:
            body.pop(name, None)
        if "max_tokens" in known:
            body["max_tokens"] = MAX_TOKENS
        if "n" in body:
            body["n"] = 2
        for nested in ("parameters", "gen_kwargs"):
            if nested in known:
                settings = body[nested] if isinstance(body.get(nested), dict) else {}
                settings.pop("max_length", None)
                body[nested] = {**settings, "max_new_tokens": MAX_TOKENS}

    def _value(self, rng: random.Random, schema: dict[str, Any], name: str, depth: int) -> Any:
        """Returns a random value that usually fits a JSON schema."""
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].removeprefix(_REF)]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._value(rng, rng.choice(schema[key]), name, depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object":
            return self._object(rng, schema, depth)
        if kind == "array":
            count = 0 if depth > 3 else rng.randint(max(1, schema.get("minItems", 0)), 3)
            return [self._value(rng, schema.get("items", {}), name, depth + 1) for _ in range(count)]
        return self._scalar(rng, kind, schema, name)

    def _object(self, rng: random.Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not properties:
            return {"role": rng.choice(("user", "assistant", "robot")), "content": rng.choice(_PROMPTS)}
        chosen = [each for each in properties if each in required or rng.random() < 0.12]
        return {each: self._value(rng, properties[each], each, depth + 1) for each in chosen}

    def _scalar(self, rng: random.Random, kind: str | None, schema: dict[str, Any], name: str) -> Any:
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
            high = min(schema.get("maximum", 1000), 10**6)
            value = rng.uniform(low, high) if rng.random() < 0.8 else rng.choice((low, high))
            return int(value) if kind == "integer" else value
        if kind == "string":
            return self._model if name == "model" else rng.choice((*_PROMPTS, *TEXTS))
        return rng.choice((None, "x", 1, [], {}, _PROMPTS[0], [5, 6, 7]))


def exchange(port: int, request: FuzzRequest, timeout_s: float) -> FuzzAnswer:
    """Sends a request and reads the response to its end. Raises TimeoutError if a whole request gets no response in
    time.

    If the request is not whole, the client reads for ``PATIENCE_S``. Then it closes its sending side and reads the
    rest.
    """
    data = bytearray()
    # the server may refuse the request before it has read all of it
    broken = contextlib.suppress(ConnectionResetError, BrokenPipeError)
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client, broken:
        client.sendall(request.data)
        if not request.is_whole:
            client.settimeout(PATIENCE_S)
            with contextlib.suppress(TimeoutError):
                _read_to_end(client, data)
                return _answer_of(data)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(timeout_s)
        _read_to_end(client, data)
    return _answer_of(data)


def _read_to_end(client: socket.socket, data: bytearray) -> None:
    while len(data) < MAX_RESPONSE_BYTES and (piece := client.recv(65536)):
        data += piece


def _answer_of(data: bytearray) -> FuzzAnswer:
    status = int(data[9:12]) if data.startswith(b"HTTP/1.") and data[9:12].isdigit() else 0
    return FuzzAnswer(status, bytes(data).partition(b"\r\n\r\n")[2])
