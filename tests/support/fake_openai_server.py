"""A tiny OpenAI-compatible server with scripted responses.

It streams given tokens at given times, or fails in a chosen way.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """The response to one request.

    ``kind`` is one of these:

    - ok: a correct response.
    - status: an HTTP error.
    - drop: the server closes the connection after ``tokens`` tokens.
    - error: an error event in the stream.
    - hang: no response.
    - no_finish: the response has no finish reason.
    - garbage: a data line that is not JSON.
    """

    kind: str = "ok"
    tokens: int = 4
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 429
    code: str | None = None
    usage: bool = True
    finish_reason: str = "length"
    token_ids: bool = False
    close: bool = False
    crlf: bool = False
    reasoning: str = ""


@dataclass
class FakeServer:
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0
    metrics: Callable[[FakeServer], str] | None = None


Script = Callable[[int, dict[str, Any]], Reply]
Metrics = Callable[[FakeServer], str]


@contextmanager
def fake_openai_server(script: Script, metrics: Metrics | None = None) -> Iterator[FakeServer]:
    """Runs a server on a free port of 127.0.0.1, in a thread.

    ``script(n, body)`` returns the reply to the n-th POST. ``metrics`` returns the content of ``/metrics``.
    """
    state = FakeServer(metrics=metrics)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(lambda r, w: _connection(state, script, r, w), "127.0.0.1", 0)
        state.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)


async def _connection(
    state: FakeServer, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    state.connections += 1
    state.open_connections += 1
    try:
        while await _exchange(state, script, reader, writer):
            pass
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        pass
    finally:
        state.open_connections -= 1
        writer.close()


async def _exchange(
    state: FakeServer, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split(" ", 2)
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if path == "/metrics" and state.metrics is not None:
        data = state.metrics(state).encode()
        head = f"HTTP/1.1 200 X\r\nContent-Type: text/plain\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return True
    if method == "GET":
        await _plain(writer, 200, {"data": [{"id": "fake-model"}]})
        return True
    index = len(state.requests)
    request = json.loads(body)
    state.requests.append(request)
    state.paths.append(path)
    state.headers.append(headers)
    reply = script(index, request)
    if reply.kind == "status":
        await _plain(writer, reply.status, {"error": {"message": "come back later", "code": reply.code}})
        return True
    if reply.kind == "hang":
        await reader.read()  # waits until the client closes the connection
        return False
    await _stream(writer, index, reply, "messages" in request)
    return reply.kind != "drop" and not reply.close


async def _plain(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def _stream(writer: asyncio.StreamWriter, index: int, reply: Reply, is_chat: bool) -> None:
    framing = "Connection: close" if reply.close else "Transfer-Encoding: chunked"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-ID: engine-{index}\r\n{framing}\r\n\r\n"
    writer.write(head.encode())
    newline = b"\r\n" if reply.crlf else b"\n"

    async def send(data: bytes) -> None:
        event = b"data: " + data + newline * 2
        writer.write(event if reply.close else f"{len(event):x}\r\n".encode() + event + b"\r\n")
        await writer.drain()

    async def send_json(**content: Any) -> None:
        await send(json.dumps({"id": f"cmpl-{index}", **content}).encode())

    if is_chat:
        await send_json(choices=[{"delta": {"role": "assistant", "content": ""}}])
    await asyncio.sleep(reply.first_s)
    if reply.reasoning:
        await send_json(choices=[{"delta": {"reasoning_content": reply.reasoning}}])
    for number in range(reply.tokens):
        if number:
            await asyncio.sleep(reply.gap_s)
        text = f" token{number}"
        choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        if reply.token_ids:
            choice["token_ids"] = [number, number + 1]
        is_last = number == reply.tokens - 1 and reply.kind == "ok"
        await send_json(choices=[choice | {"finish_reason": reply.finish_reason if is_last else None}])
    if reply.kind == "drop":
        return
    if reply.kind == "error":
        await send_json(error={"message": "agent lost"})
    if reply.kind == "garbage":
        await send(b"{not json")
    if reply.kind == "ok":
        if reply.usage:
            await send_json(choices=[], usage={"prompt_tokens": 7, "completion_tokens": reply.tokens})
        await send(b"[DONE]")
    if not reply.close:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
