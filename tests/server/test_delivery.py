"""Tests when the HTTP server reports output as delivered.

Output counts as delivered when the server has written it to the socket. While a slow client does not read, the socket
is full, so the output is written and delivered later.
"""

import asyncio
import contextlib
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_serving.engine.outputs import MERGE_AT
from llm_serving.errors import DeadlineExceededError
from llm_serving.request import FinishReason, RequestOutput, TokenLogits
from llm_serving.sampling_params import SamplingParams
from llm_serving.server.errors import UnavailableError
from llm_serving.server.http.json_pieces import SEND_BYTES
from llm_serving.server.http.lifecycle import ActiveRequests
from llm_serving.server.http.protocol import STREAM_CHANNEL
from llm_serving.server.http.sse import EventStream
from llm_serving.server.limits import INLINE_ITEMS, UNSENT_BYTES
from support.http_server import http_request, read_response, wait_until
from support.time_limits import time_limit

STREAM = {"prompt": "a", "max_tokens": 100, "stream": True}


def request_bytes(body) -> bytes:
    return http_request("/v1/completions", json.dumps(body).encode())


def test_every_piece_of_a_stream_is_delivered_when_it_comes(server, engine):
    engine.say("hello to the bird")
    delay = engine.delay_s = time_limit(0.02)
    start = time.monotonic()
    server.events("/v1/completions", STREAM)
    [request] = engine.submitted
    wait_until(lambda: engine.num_open == 0)
    assert request.streamed
    assert len(request.delivered) >= 4
    assert request.delivered == sorted(request.delivered)
    assert request.delivered[0] - start < 5 * delay < 4 * delay + request.delivered[-1] - start
    assert not request.aborted


def test_head_and_first_event_are_one_write_and_so_are_last_event_and_end(server, engine):
    engine.say("hello")
    engine.delay_s = 0.05
    with server.raw(request_bytes(STREAM)) as connection:
        reads = []
        while not reads or not reads[-1].endswith(b"\r\n0\r\n\r\n"):
            reads.append(connection.recv(65536))
    assert reads[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" in reads[0]
    assert b'"text":" hello"' in reads[0]
    assert b"data: [DONE]" in reads[-1]
    assert len(reads) == 2


def test_delivery_to_a_slow_client_is_when_it_reads(server, engine, monkeypatch):
    """The pieces of a slow client wait and are merged. They count as delivered when their last byte is written."""
    engine.script = lambda prompt, sampling: [300] * 100
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda *args: _longer(step(*args)))
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request_bytes(STREAM))
    wait_until(lambda: bool(engine.submitted) and engine.submitted[0].finished, timeout_s=10)
    [request] = engine.submitted
    early = list(request.delivered)
    time.sleep(0.3)
    assert request.delivered == early
    assert engine.num_open == 1
    assert 0 < bytes_in_system(server, connection) < 3 * UNSENT_BYTES
    reading_from = time.monotonic()
    _, _, body = read_all(connection)
    wait_until(lambda: engine.num_open == 0)
    assert request.delivered[-1] >= reading_from
    assert body.count(b"Q") == 100 * LONG
    assert body.count(b"data: {") < 80, "pieces that waited were merged"
    assert not request.aborted


LONG = 100_000


def bytes_in_system(server, connection):
    """Returns the number of bytes that the server has written and the client's system has not received yet."""
    client = connection.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, _, queues = line.split()[1:5]
        if [int(address.partition(":")[2], 16) for address in (local, remote)] == [server.port, client]:
            return int(queues.partition(":")[0], 16)
    raise AssertionError("the system does not list the connection")


def _longer(piece):
    piece.text = "Q" * LONG
    return piece


def read_all(connection):
    """Reads a response up to its last chunk. Returns its head, None, and its body as bytes.

    The body keeps the chunk frames. The second value has no use.
    """
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        chunk = connection.recv(1 << 20)
        assert chunk
        data += chunk
    connection.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return head, None, body


def test_no_delivery_to_a_client_that_left_before_the_first_token(server, engine):
    engine.delay_s = 5
    server.raw(request_bytes(STREAM)).close()
    wait_until(lambda: bool(engine.submitted) and engine.submitted[0].aborted)
    [request] = engine.submitted
    assert request.delivered == []
    assert request.closed_at is not None


def test_an_answer_that_is_not_streamed_is_closed_when_it_was_sent(server, engine):
    engine.delay_s = 0.01
    start = time.monotonic()
    with server.raw(request_bytes({"prompt": "a"})) as connection:
        assert read_response(connection)[0] == 200
    wait_until(lambda: engine.num_open == 0)
    [request] = engine.submitted
    assert (request.streamed, request.delivered, request.aborted) == (False, [], False)
    assert start + 0.01 < request.closed_at < time.monotonic()


def test_a_stream_that_fails_is_closed_when_the_error_was_sent(server, engine):
    engine.fail_after = 2
    events = server.events("/v1/completions", STREAM)
    wait_until(lambda: engine.num_open == 0)
    [request] = engine.submitted
    assert "error" in events[-2]
    assert len(request.delivered) == 2
    assert request.closed_at >= request.delivered[-1]


def test_log_probabilities_are_computed_on_request_only(server, engine):
    for body, wanted in (({}, False), ({"logprobs": 0}, True), ({"logprobs": 2}, True)):
        server.post("/v1/completions", {"prompt": "a", **body})
        assert engine.submitted[-1].sampling.wants_logits is wanted
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for body, wanted in (({}, False), ({"logprobs": True}, True)):
        server.post("/v1/chat/completions", {**chat, **body})
        assert engine.submitted[-1].sampling.wants_logits is wanted
    for body, wanted in (({}, False), ({"parameters": {"details": True}}, True)):
        server.post("/generate", {"inputs": "a", **body})
        assert engine.submitted[-1].sampling.wants_logits is wanted
    server.events("/generate_stream", {"inputs": "a"})
    assert engine.submitted[-1].sampling.wants_logits


class SlowChannel:
    """A channel that accepts data only when a test permits it."""

    def __init__(self):
        self.is_full = True
        self.written = []

    def start(self, headers, body, *, is_last=False):
        self.write(body, is_last=is_last)

    def write(self, body, *, is_last=False):
        self.written += body.split()

    def attach(self, user):
        pass

    def detach(self):
        pass


class TextOnly:
    """Formats each piece as its plain text, without an event around it."""

    def events(self, choice, piece):
        return piece.text.encode()

    def last(self):
        return b""

    def error(self, reply):
        return b"error"


CHOICE = SimpleNamespace(sampling=SamplingParams(top_logits=20))


def piece_with_logits(number, reason=None):
    """Returns a piece whose text is ``number``, with the 20 best alternatives of its token."""
    logits = TokenLogits(300, -1.0, 2.0, tuple((i, 0.0) for i in range(20)))
    return RequestOutput("a", f"{number} ", (300,), (logits,), 1, number, reason)


def test_kept_pieces_are_written_in_order_and_in_parts():
    """Pieces that wait for a slow client are written in order, in several parts.

    The event loop runs other tasks between the parts.
    """
    count = 20 * MERGE_AT

    async def run():
        generation = SimpleNamespace(
            choices=[CHOICE], request_id="a", delivered=lambda index, now: None, note_end=lambda index, piece: None
        )
        stream, channel = EventStream(generation, TextOnly()), SlowChannel()
        stream._channel, stream._over = channel, asyncio.get_running_loop().create_future()
        for number in range(count):
            stream.push(0, piece_with_logits(number))
        assert channel.written == []
        channel.is_full = False
        stream.drained()
        assert MERGE_AT <= len(channel.written) <= 2 * INLINE_ITEMS // 20
        # The last piece must not overtake the pieces that wait.
        stream.push(0, piece_with_logits(count, FinishReason.LENGTH))
        rounds = 0
        while not stream._over.done():
            await asyncio.sleep(0)
            rounds += 1
        assert rounds > 3
        assert channel.written == [str(number).encode() for number in range(count + 1)]

    asyncio.run(run())


def test_kept_pieces_of_a_failed_stream_are_written_in_parts():
    """If a stream fails, the pieces that wait for its slow client come before the error, in several parts.

    The event loop runs other tasks between the parts.
    """
    count, seen = 20 * MERGE_AT, []

    async def run():
        channel = SlowChannel()

        def watch():
            if "error" not in seen:
                seen.append("error" if b"error" in channel.written else len(channel.written))
                asyncio.get_running_loop().call_soon(watch)

        async def open_and_fail(stream, *, streamed):
            stream._started = True
            for number in range(count):
                stream.push(0, piece_with_logits(number))
            asyncio.get_running_loop().call_soon(watch)
            raise UnavailableError("The engine failed.", "engine_failed")

        state = SimpleNamespace(active=SimpleNamespace(this_task=contextlib.nullcontext), log=None)
        generation = SimpleNamespace(
            choices=[CHOICE], request_id="a", state=state, open=open_and_fail, is_refused=False
        )
        stream = EventStream(generation, TextOnly())
        await stream({STREAM_CHANNEL: channel, "path": "/"}, None, None)
        assert channel.written == [*(str(number).encode() for number in range(count)), b"error"]
        while "error" not in seen:
            await asyncio.sleep(0)

    asyncio.run(run())
    parts = [number for number in seen if number != "error"]
    assert len(parts) > 3
    assert max(after - before for before, after in zip([0, *parts], [*parts, count], strict=True)) < count // 3


class LongEvents:
    """Formats each piece as events that are too long for one write."""

    def events(self, choice, piece):
        return [bytes([ord(piece.text)]) * 1000] * (3 * SEND_BYTES // 1000)

    def last(self):
        return [b"end"]

    def error(self, reply):
        return [b"e" * 1000] * (3 * SEND_BYTES // 1000)


class CountedChannel:
    """A channel that notes the loop iteration of each write. It refuses data after every ``full_after`` writes."""

    def __init__(self, full_after=0):
        self.full_after, self.writes, self.turn, self.is_full = full_after, [], 0, False

    def attach(self, user):
        pass

    def detach(self):
        pass

    def start(self, headers, body, *, is_last=False):
        self.write(body, is_last=is_last)

    def write(self, body, *, is_last=False):
        self.writes.append((self.turn, body, is_last))
        self.is_full = bool(self.full_after) and len(self.writes) % self.full_after == 0

    async def count(self):
        while True:
            await asyncio.sleep(0)
            self.turn += 1


def long_stream():
    generation = SimpleNamespace(
        choices=[CHOICE], request_id="a", delivered=lambda index, now: None, note_end=lambda index, piece: None
    )
    return EventStream(generation, LongEvents())


def long_piece(text, reason=None):
    return RequestOutput("a", text, (300,), (), 1, 1, reason)


@pytest.mark.parametrize("full_after", [0, 1, 2])
def test_long_events_are_written_in_parts(full_after):
    """The event loop runs other tasks between the parts, and the next piece does not overtake them."""

    async def run():
        stream, channel = long_stream(), CountedChannel(full_after)
        stream._channel, stream._over = channel, asyncio.get_running_loop().create_future()
        counting = asyncio.ensure_future(channel.count())
        await asyncio.sleep(0)
        stream.push(0, long_piece("a"))
        stream.push(0, long_piece("b", FinishReason.LENGTH))
        assert len(channel.writes) == 1
        while not stream._over.done():
            await asyncio.sleep(0)
            if channel.is_full:
                written = len(channel.writes)
                await asyncio.sleep(0)
                assert len(channel.writes) == written, "nothing is written while the socket is full"
                channel.is_full = False
                stream.drained()
        counting.cancel()
        return channel.writes

    writes = asyncio.run(run())
    turns, bodies, ends = zip(*writes, strict=True)
    size = 3 * SEND_BYTES // 1000 * 1000
    assert b"".join(bodies) == b"a" * size + b"b" * size + b"end"
    assert max(map(len, bodies)) < SEND_BYTES + 1000
    assert len(set(turns)) >= len(turns) - 1, "only the next piece may follow the end of a piece at once"
    assert ends == (False,) * (len(ends) - 1) + (True,)


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_an_error_follows_whole_events(reason):
    """After an error, the parts of the events are still written. The error follows unless the response is complete."""

    async def run():
        stream, channel = long_stream(), CountedChannel()
        state = SimpleNamespace(active=ActiveRequests(), log=SimpleNamespace(event=lambda *args, **fields: None))
        stream._generation.state, stream._generation.is_refused = state, False

        async def opened(sink, *, streamed):
            stream.push(0, long_piece("a", reason))
            if reason is None:
                stream.push(0, long_piece("b"))
            sink._end(DeadlineExceededError("late", param="deadline_ms"))

        stream._generation.open = opened
        await stream({"path": "/", STREAM_CHANNEL: channel}, None, None)
        return channel.writes

    writes = asyncio.run(run())
    size = 3 * SEND_BYTES // 1000 * 1000
    end = b"b" * size + b"e" * size if reason is None else b"end"
    assert b"".join(body for _, body, _ in writes) == b"a" * size + end
    assert max(len(body) for _, body, _ in writes) < SEND_BYTES + 1000
    assert [is_last for *_, is_last in writes] == [False] * (len(writes) - 1) + [True]
