"""Tests encrypted connections: streams, slow clients, client certificates, renewed certificates, and wrong files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
from dataclasses import replace
from functools import partial

import httpx
import pytest

from llm_serving.access.tls import ServerTls
from llm_serving.errors import ConfigError
from llm_serving.server.http import tls_listener
from support.access_keys import SilentLog, access_for, secret_of
from support.certificates import client_context, make_authority, make_certificate
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, http_request, wait_until
from support.lazy_module import LazyModule
from support.time_limits import time_limit

openai = LazyModule("openai")

LIVE = b'{"status":"live"}'
STREAM = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()


class Certificates:
    def __init__(self, folder):
        self.folder = folder
        self.authority = make_authority(folder, "authority")
        self.server = make_certificate(folder, "server", self.authority)
        self.client = make_certificate(folder, "client", self.authority)
        self.stranger = make_certificate(folder, "stranger", make_authority(folder, "other"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def tls_server(tokenizer, certificates, *, client_ca=None, access=None, files=None, **settings):
    server = HttpServer(FakeEngine(tokenizer), access, **settings)
    cert, key = files or certificates.server
    server.tls = ServerTls(str(cert), str(key), client_ca and str(client_ca), SilentLog())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def url(server):
    return f"https://127.0.0.1:{server.port}"


@contextlib.contextmanager
def encrypted(server, certificates, data=b"", certificate=None):
    """Opens a TLS connection and sends ``data``."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=time_limit(10)) as plain,
        client_context(certificates.authority, certificate).wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(data)
        yield wrapped


def read_until(connection, end):
    data = b""
    while not data.endswith(end):
        piece = connection.recv(65536)
        assert piece, data[-200:]
        data += piece
    return data


@pytest.fixture(scope="module")
def served(tokenizer, certificates, tmp_path_factory):
    access = access_for(tmp_path_factory.mktemp("access"), "alice")
    with tls_server(tokenizer, certificates, access=access) as server:
        yield server


@pytest.fixture
def server(served):
    served.engine.reset()
    return served


def test_the_official_client_streams_over_tls(server, certificates):
    http = httpx.Client(verify=client_context(certificates.authority), timeout=time_limit(10))
    options = {"base_url": f"{url(server)}/v1", "max_retries": 0, "http_client": http}
    with openai.OpenAI(api_key=secret_of("alice"), **options) as api:
        whole = api.completions.create(model="fake-llama", prompt="a").choices[0].text
        for _ in range(3):  # one connection serves several streams, one after the other
            chunks = list(api.completions.create(model="fake-llama", prompt="a", stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole
            assert len(chunks) > 3
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()


def test_a_client_that_does_not_read_gets_everything_later(server, certificates):
    """The buffers of the connection fill up. The server keeps the next pieces until the client reads again."""
    server.engine.script = lambda prompt, sampling: [300] * 99
    server.engine._step, plain = large_pieces(server.engine._step), server.engine._step
    try:
        request = http_request("/v1/completions", STREAM, f"Authorization: Bearer {secret_of('alice')}")
        with encrypted(server, certificates, request) as connection:
            wait_until(lambda: bool(server.engine.submitted) and server.engine.submitted[0].finished, timeout_s=20)
            assert len(server.engine.submitted[0].delivered) < 99
            data = read_until(connection, b"0\r\n\r\n")
    finally:
        server.engine._step = plain
    assert data.count(b"x" * 100_000) == 99
    assert b"data: [DONE]" in data


def large_pieces(step):
    """Wraps the engine's function ``step``, so that each piece of output has 100 kB of text.

    Then 99 pieces fill the buffers of socket and TLS transport.
    """
    return lambda *arguments: replace(step(*arguments), text="x" * 100_000)


def test_a_client_that_leaves_ends_the_request(server, certificates):
    server.engine.delay_s = 0.01
    server.engine.script = lambda prompt, sampling: [300] * 1000
    request = http_request("/v1/completions", STREAM, f"Authorization: Bearer {secret_of('alice')}")
    with encrypted(server, certificates, request):
        wait_until(lambda: bool(server.engine.submitted) and server.engine.submitted[0].num_pieces > 2)
    wait_until(lambda: server.engine.submitted[0].aborted)


def test_a_client_without_tls_gets_nothing(server):
    with server.raw(http_request("/health/live", b"", method="GET")) as connection, contextlib.suppress(OSError):
        assert not connection.recv(65536).startswith(b"HTTP")


def test_old_versions_of_tls_are_refused(server, certificates):
    context = client_context(certificates.authority)
    # Without this line, OpenSSL in the client itself refuses these versions of TLS.
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with server.raw(b"") as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_only_clients_with_a_certificate_connect(tokenizer, certificates):
    def status(certificate):
        try:
            with encrypted(server, certificates, request, certificate) as connection:
                return int(connection.recv(65536).split()[1])
        except OSError:
            return "refused"
        except IndexError:
            return "closed"

    request = http_request("/health/live", b"", method="GET")
    with tls_server(tokenizer, certificates, client_ca=certificates.authority) as server:
        assert status(certificates.client) == 200
        assert status(None) in ("refused", "closed")
        assert status(certificates.stranger) in ("refused", "closed")


def test_a_renewed_certificate_is_used_without_a_restart(tokenizer, certificates, tmp_path):
    def install(pair):
        for source, place in zip(pair, files, strict=True):
            shutil.copy(source, tmp_path / "new")
            os.replace(tmp_path / "new", place)

    def name():
        with encrypted(server, certificates) as connection:
            return dict(part[0] for part in connection.getpeercert()["subject"])["commonName"]

    files = (tmp_path / "tls.pem", tmp_path / "tls.key")
    install(certificates.server)
    request = http_request("/health/live", b"", method="GET")
    with tls_server(tokenizer, certificates, files=files) as server, encrypted(server, certificates) as old:
        assert name() == "server"
        install(certificates.client)
        wait_until(lambda: name() == "client")
        shutil.copy(certificates.server[0], tmp_path / "tls.pem")  # this certificate does not match the private key
        server.tls.refresh()
        assert name() == "client"
        (tmp_path / "tls.pem").write_text("garbage")
        assert server.tls.refresh() is False
        assert name() == "client"
        old.sendall(request)
        assert old.recv(65536).startswith(b"HTTP/1.1 200")


def is_closed(connection):
    try:
        return connection.recv(65536) == b""
    except ConnectionError:
        return True


def test_connections_in_a_handshake_count_and_must_complete_it(tokenizer, certificates, monkeypatch):
    monkeypatch.setattr(tls_listener, "HEADER_TIMEOUT_S", time_limit(1.0))
    request = http_request("/health/live", b"", method="GET")
    with tls_server(tokenizer, certificates, max_connections=3) as server, contextlib.ExitStack() as stack:
        refused = partial(server.metrics.registry.get_sample_value, "llm_serving_connections_refused_total")
        with encrypted(server, certificates, request) as connection:
            read_until(connection, LIVE)
            silent = [stack.enter_context(server.raw(data)) for data in (b"", b"\x16\x03\x01")]
            assert is_closed(stack.enter_context(server.raw(b"")))
            assert refused() == 1.0
            # The server closes a connection whose handshake takes longer than HEADER_TIMEOUT_S.
            assert [is_closed(one) for one in silent] == [True, True]
            connection.sendall(request)  # the connection whose handshake is complete stays open
            read_until(connection, LIVE)
        with encrypted(server, certificates, request) as connection:
            read_until(connection, LIVE)
        assert refused() == 1.0


def test_an_unfinished_handshake_does_not_delay_the_end_of_the_server(tokenizer, certificates):
    with tls_server(tokenizer, certificates) as server:
        connection = server.raw(b"\x16\x03\x01")
        with encrypted(server, certificates):
            pass  # the server accepts connections in order, so it has now accepted the unfinished connection, too
    assert is_closed(connection)
    connection.close()


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "problem"),
    [
        ("missing.pem", "server.key", None, "tls_cert: cannot read .*missing.pem"),
        ("server.pem", "missing.key", None, "tls_key: cannot read .*missing.key"),
        ("server.pem", "client.key", None, "KEY_VALUES_MISMATCH"),
        ("server.key", "server.pem", None, "cannot use"),
        ("server.pem", "locked.key", None, "the key has a password"),
        ("server.pem", "server.key", "server.key", "tls_client_ca: .* no certificates"),
        ("server.pem", "server.key", "missing.pem", "tls_client_ca: cannot read"),
    ],
)
def test_wrong_files_stop_the_start(certificates, cert, key, client_ca, problem):
    folder = certificates.folder
    if key == "locked.key":
        command = ["openssl", "ec", "-in", "server.key", "-out", "locked.key", "-aes128", "-passout", "pass:secret"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    with pytest.raises(ConfigError, match=f"serving_config.*{problem}"):
        ServerTls(str(folder / cert), str(folder / key), client_ca and str(folder / client_ca), SilentLog())
