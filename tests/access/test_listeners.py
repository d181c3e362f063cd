"""Tests the UNIX socket, the port for administration, and the limit of connections over all listeners."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import httpx
import pytest

from llm_serving.access.listening import listen_unix
from llm_serving.errors import ConfigError
from llm_serving.server.app import split_administration
from llm_serving.server.run import Listener
from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import HttpServer

KEY = "serving_config.unix_socket"


@pytest.fixture(scope="module")
def split(tokenizer, tmp_path_factory):
    """Provides a server with keys, a UNIX socket, and a separate port for administration."""
    folder = tmp_path_factory.mktemp("listeners")
    server = HttpServer(FakeEngine(tokenizer), access_for(folder, "alice", "root admin"))
    server.app, administration = split_administration(server.app)
    admin_socket = socket.create_server(("127.0.0.1", 0))
    server.admin_url = f"http://127.0.0.1:{admin_socket.getsockname()[1]}"
    server.path = folder / "server.sock"
    with listen_unix(str(server.path), 0o600, backlog=10) as unix_socket:
        server.others = [Listener(admin_socket, administration), Listener(unix_socket, server.app)]
        server.start()
        try:
            yield server
        finally:
            server.stop()
    assert not server.path.exists()


@pytest.fixture(scope="module")
def clients(split):
    with (
        httpx.Client(base_url=split.admin_url) as admin,
        httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(split.path))) as unix,
    ):
        yield {"public": split.http, "admin": admin, "unix": unix}


@pytest.mark.parametrize(
    ("route", "public", "admin"),
    [("/metrics", 404, 200), ("/server_info", 404, 200), ("/health/live", 200, 200), ("/health/ready", 200, 200),
     ("/static/js/main.js", 200, 200), ("/operator", 404, 200), ("/requests", 404, 200), ("/v1/models", 200, 404),
     ("/docs", 200, 404), ("/unknown", 404, 404)],
)  # fmt: skip
def test_each_listener_has_its_routes(clients, route, public, admin):
    found = {name: client.get(route, headers=bearer("root")).status_code for name, client in clients.items()}
    assert found == {"public": public, "unix": public, "admin": admin}


def test_every_listener_needs_a_key(clients):
    for client in clients.values():
        assert [client.get(path).status_code for path in ("/metrics", "/v1/models", "/unknown")] == [401] * 3
        assert client.get("/health/live").status_code == 200
    assert clients["admin"].get("/metrics", headers=bearer("alice")).status_code == 403


def test_the_unix_socket_serves_text(split, clients):
    body = {"prompt": "a", "stream": True}
    with clients["unix"].stream("POST", "/v1/completions", json=body, headers=bearer("alice")) as response:
        lines = [line for line in response.iter_lines() if line]
    assert (response.status_code, lines[-1]) == (200, "data: [DONE]")
    assert split.path.stat().st_mode & 0o777 == 0o600


def test_all_listeners_share_the_limit_of_connections(tokenizer):
    server = HttpServer(FakeEngine(tokenizer), max_connections=2)
    second = socket.create_server(("127.0.0.1", 0))
    server.others = [Listener(second, server.app)]
    server.start()
    try:
        with (
            socket.create_connection(second.getsockname()) as first,
            server.raw(b"GET / HTTP/1.1\r\n"),
        ):
            first.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            with socket.create_connection(second.getsockname()) as third:
                assert third.recv(65536).startswith(b"HTTP/1.1 503")
    finally:
        server.stop()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_of_the_socket_does_not_depend_on_the_umask(tmp_path, mode):
    before = os.umask(0o077)
    try:
        with listen_unix(str(tmp_path / "s"), mode, backlog=1):
            assert (tmp_path / "s").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_a_socket_that_was_left_behind_is_replaced(tmp_path):
    path = tmp_path / "s"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as left_behind:
        left_behind.bind(str(path))
    with listened(str(path)), contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_of_a_running_server_stays(tmp_path):
    path = str(tmp_path / "s")
    with listen_unix(path, 0o600, backlog=1):
        with pytest.raises(ConfigError, match=f"{KEY}: another server listens on"), listened(path):
            pass
        assert Path(path).exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("file", "exists and is not a socket"), ("link", "exists and is not a socket"), ("no/folder", "No such file"),
     ("x" * 200, "too long")],
)  # fmt: skip
def test_paths_that_cannot_be_sockets(tmp_path, name, problem):
    (tmp_path / "file").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"{KEY}: .*{problem}"), listened(str(tmp_path / name)):
        pass
    assert (tmp_path / "file").read_text() == "keep"
    assert (tmp_path / "link").is_symlink()


def listened(path):
    return listen_unix(path, 0o600, backlog=1)


def test_a_socket_that_another_server_has_put_there_is_not_removed(tmp_path):
    path = tmp_path / "s"
    with listen_unix(str(path), 0o600, backlog=1):
        path.unlink()
        path.write_text("another")
    assert path.exists()
