"""Tests clients that disconnect, on a raw socket. Their request is aborted in every state."""

import json
import socket
import struct

import pytest

from llm_serving.server.http import body as body_module
from llm_serving.server.http import protocol as http_protocol
from support.http_server import MAX_BODY_BYTES, http_request, read_response, wait_until

SLOW = {"prompt": "a", "max_tokens": 100}
ENDLESS = [300] * 100
MIB = 1024 * 1024


def slow(engine, delay_s=0.05):
    engine.script = lambda prompt, sampling: ENDLESS
    engine.delay_s = delay_s


def aborted(engine) -> bool:
    return bool(engine.submitted) and all(request.aborted for request in engine.submitted)


def pieces(engine) -> list[int]:
    return [request.num_pieces for request in engine.submitted]


def watch_kept_bytes(server, monkeypatch) -> list[int]:
    """Returns a list that gets the bytes of all request bodies that the server keeps, after each chunk of a body."""
    add, kept = body_module._CountedBytes.add, [server.app.state.body_bytes]

    def watched(counted, size):
        add(counted, size)
        kept.append(server.app.state.body_bytes)

    monkeypatch.setattr(body_module._CountedBytes, "add", watched)
    return kept


def reset(connection: socket.socket) -> None:
    """Closes the connection with RST, as the kernel does for a killed process with unread data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


CASES = [
    ("/v1/completions", SLOW),
    ("/v1/completions", {**SLOW, "stream": True}),
    ("/v1/completions", {**SLOW, "n": 3, "stream": True}),
    ("/v1/completions", {**SLOW, "prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/generate", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a"}),
    ("/chat", {"query": "a"}),
    ("/stream_chat_post", {"query": "a"}),
]


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize(("path", "body"), CASES)
def test_going_away_aborts(server, engine, path, body, close, record_property):
    slow(engine)
    connection = server.raw(http_request(path, json.dumps(body).encode()))
    wait_until(lambda: any(pieces(engine)))
    before = pieces(engine)
    close(connection)
    wait_until(lambda: aborted(engine))
    record_property("steps_after_leaving", max(map(int.__sub__, pieces(engine), before)))
    assert server.log.named("internal_error") == []


def test_going_away_before_the_first_token_aborts(server, engine):
    slow(engine, delay_s=3600)  # no write fails, so only the end of the connection aborts the request
    connection = server.raw(http_request("/v1/completions", json.dumps({**SLOW, "stream": True}).encode()))
    wait_until(lambda: bool(engine.submitted))
    connection.close()
    wait_until(lambda: aborted(engine))


def test_a_client_that_does_not_read_holds_up_only_itself(server, engine, tokenizer):
    answer = tokenizer.encode("hello to the bird " * 10, add_special_tokens=False)
    engine.script = lambda prompt, sampling: answer * 1000
    connection = server.raw(http_request("/v1/completions", json.dumps({**SLOW, "stream": True}).encode()))
    wait_until(lambda: bool(engine.submitted) and engine.submitted[0].num_pieces > 10)
    engine.say("hello")
    assert server.post("/v1/completions", {"prompt": "a"}).json()["choices"][0]["text"] == " hello"
    connection.close()
    wait_until(lambda: engine.submitted[0].finished or engine.submitted[0].aborted)


def test_a_disconnect_after_half_a_body_submits_no_request(server, engine):
    data = http_request("/v1/completions", json.dumps(SLOW).encode())
    for cut in (len(data) - 5, data.index(b"\r\n\r\n") + 4, 30, 1):
        server.raw(data[:cut]).close()
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert len(engine.submitted) == 1
    assert server.log.named("internal_error") == []


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.2)
    data = http_request("/v1/completions", json.dumps(SLOW).encode())
    with server.raw(data[:-5]) as connection:
        status, headers, body = read_response(connection)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["message"] == "The request body did not arrive within 0.2 seconds."
        assert connection.recv(1) == b""


def test_headers_that_do_not_come_are_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.2)
    for data in (b"", b"POST /v1/comp"):
        with server.raw(data) as connection:
            assert read_response(connection)[0] == 408


def test_endless_headers_are_cut_off(server, record_property):
    with server.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ") as connection:
        answer, sent = b"", 0
        try:
            for _ in range(40):
                connection.sendall(b"x" * 8192)
                sent += 8192
            answer = connection.recv(64)
        except (BrokenPipeError, ConnectionResetError):
            answer = answer or b"HTTP/1.1 431 (reset before it could be read)"
    record_property("endless_mib", sent / MIB)
    assert answer.startswith(b"HTTP/1.1 431")


def test_a_chunked_body_is_bounded_while_it_is_read(server, monkeypatch, record_property):
    kept = watch_kept_bytes(server, monkeypatch)
    head = http_request("/v1/completions", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    with server.raw(head) as connection:
        for _ in range(MAX_BODY_BYTES // 8192 + 2):
            connection.sendall(b"2000\r\n" + b" " * 8192 + b"\r\n")
        status, headers, body = read_response(connection)
        assert (status, headers["connection"]) == (413, "close")
        assert "more than" in json.loads(body)["error"]["message"]
    record_property("kept_bytes", max(kept))
    assert max(kept) <= MAX_BODY_BYTES


def test_a_large_body_is_refused_before_it_is_sent(server, monkeypatch, record_property):
    kept = watch_kept_bytes(server, monkeypatch)
    monkeypatch.setattr(body_module, "DRAIN_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 3600.0)
    head = http_request("/v1/completions", b"", "Content-Length: 9999999", "Expect: 100-continue")
    with server.raw(head) as connection:
        assert read_response(connection)[0] == 413
    record_property("kept_bytes", max(kept))


def test_bytes_that_are_not_http(server):
    with server.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not http at all\r\n\r\n") as connection:
        assert read_response(connection)[0] == 400
    assert server.http.get("/health/live").status_code == 200


CHUNKED = http_request("/v1/completions", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")


def send_until_refused(connection: socket.socket, block: bytes) -> tuple[int, bytes]:
    """Sends ``block`` repeatedly until the server closes the connection.

    Returns the number of bytes that were sent, and the response if it arrived.
    """
    sent = 0
    answer = b""
    try:
        while sent < 16 * MIB:
            connection.sendall(block)
            sent += len(block)
        answer = connection.recv(64)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent, answer


@pytest.mark.parametrize(
    "block",
    [
        b"X-Trailer: x\r\n" * 4096,
        b"x" * 65536,
        b"X-Trailer: " + b"x" * 65536,
    ],
    ids=["many", "no colon", "long"],
)
def test_endless_trailers_are_cut_off(server, engine, block, record_property):
    with server.raw(CHUNKED + b"1\r\n{\r\n0\r\n") as connection:
        sent, answer = send_until_refused(connection, block)
    record_property("endless_mib", sent / MIB)
    assert sent < 16 * MIB
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert engine.submitted == []


def test_one_trailer_is_refused(server, engine):
    body = b'{"prompt": "a"}'
    with server.raw(CHUNKED + b"%x\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(body), body)) as connection:
        assert read_response(connection)[0] == 400
        assert connection.recv(1) == b""
    assert engine.submitted == []


def test_endless_chunk_extensions_are_cut_off(server, record_property):
    with server.raw(CHUNKED + b"1;x=") as connection:
        sent, _ = send_until_refused(connection, b"x" * 65536)
    record_property("endless_mib", sent / MIB)
    assert sent < 16 * MIB


def test_small_chunks_are_accepted(server, engine):
    body = json.dumps({"prompt": [5] * 20, "max_tokens": 3}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with server.raw(CHUNKED) as connection:
        for start in range(0, len(chunks), 60):
            connection.sendall(chunks[start : start + 60])
        connection.sendall(b"0\r\n\r\n")
        assert read_response(connection)[0] == 200


def test_a_message_that_does_not_end_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(http_protocol, "MESSAGE_TIMEOUT_S", 0.2)
    head = CHUNKED.replace(b"POST /v1/completions", b"GET /health/live")
    with server.raw(head + b"1\r\nx\r\n") as connection:
        assert read_response(connection)[0] == 200
        assert connection.recv(1) == b""  # the server closes the connection, although the body is not complete


def test_requests_on_one_connection(server, engine):
    request = http_request("/v1/completions", b'{"prompt": "a"}')
    with server.raw(request) as connection:
        for _ in range(3):
            assert read_response(connection)[0] == 200
            connection.sendall(b"\r\n" + request)  # some clients send an empty line after a body
        assert read_response(connection)[0] == 200
    assert len(engine.submitted) == 4


def test_pipelined_requests_are_not_run(server, engine):
    request = http_request("/v1/completions", b'{"prompt": "a"}')
    with server.raw(request * 3) as connection:
        status, headers, _ = read_response(connection)
        assert (status, headers["connection"]) == (200, "close")
        assert connection.recv(1) == b""
    assert len(engine.submitted) == 1


def test_garbage_after_a_request_does_not_replace_its_response(server, engine):
    slow(engine, delay_s=0.01)
    with server.raw(http_request("/v1/completions", b'{"prompt": "a", "max_tokens": 5}') + b"\x00\x01") as connection:
        assert read_response(connection)[0] == 200
        assert connection.recv(1) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_going_away_after_a_pipelined_request_aborts(server, engine, stream):
    slow(engine)
    request = http_request("/v1/completions", json.dumps({**SLOW, "stream": stream}).encode())
    connection = server.raw(request)
    wait_until(lambda: any(one.num_pieces for one in engine.submitted))
    connection.sendall(request + http_request("/v1/completions", b"x" * 200_000))
    connection.close()
    wait_until(lambda: aborted(engine))
    assert len(engine.submitted) == 1
