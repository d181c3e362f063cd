"""Tests a server with keys, TLS, a UNIX socket and a port for administration, started by its command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from support.access_keys import bearer, secret_of, write_keys
from support.certificates import client_context, make_authority, make_certificate
from support.http_server import wait_until
from support.lazy_module import LazyModule
from support.server_process import running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

openai = LazyModule("openai")

PROMPT = [1, *range(300, 400)]
KEYS = ["alice", "bob", "root admin", "narrow requests_per_minute=1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    authority = make_authority(folder, "authority")
    certificate, key = make_certificate(folder, "server", authority)
    settings = {
        "api_keys_file": write_keys(folder / "keys", KEYS),
        "audit_log": folder / "audit.log",
        "tls_cert": certificate,
        "tls_key": key,
        "unix_socket": folder / "server.sock",
        "admin_port": 0,
    }
    overrides = [f"serving_config.{name}={value}" for name, value in settings.items()]
    with running_server(folder, [*overrides, "scheduler_config.prefix_cache=true"]) as running:
        assert running.url.startswith("https://")
        running.authority = authority
        yield running
    assert not (folder / "server.sock").exists()


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, verify=client_context(server.authority), timeout=time_limit(60)) as client:
        yield client


def complete(http, name, **fields):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    response = http.post("/v1/completions", json=body, headers=bearer(name))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_prefix_cache_reveals_nothing_of_other_keys(http, record_property):
    """Checks E9 of docs/reliability.md: a key never hits cached blocks of another key, even with the same salt.

    The text is the same with and without a hit.
    """
    text, cached = complete(http, "alice")
    assert cached == 0
    assert complete(http, "alice") == (text, 100)
    first = [complete(http, "bob")]
    assert complete(http, "bob") == (text, 100)
    first.append(complete(http, "alice", cache_salt="x"))
    first.append(complete(http, "bob", cache_salt="x"))
    assert complete(http, "bob", cache_salt="x") == (text, 100)
    record_property("shared_tokens", f"{sum(cached for _, cached in first)} of {len(first)}")
    assert first == [(text, 0)] * 3


def test_each_listener_has_its_routes(server, http):
    assert http.get("/health/live").status_code == 200
    assert http.get("/v1/models").status_code == 401
    assert http.get("/metrics", headers=bearer("root")).status_code == 404
    [ready] = server.events("server_ready")
    with httpx.Client(base_url=ready["admin_url"], verify=client_context(server.authority)) as admin:
        assert admin.get("/metrics").status_code == 401
        assert "llm_serving_access_refused_total" in admin.get("/metrics", headers=bearer("root")).text
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.folder / "server.sock"))) as unix:
        assert unix.get("http://localhost/v1/models").status_code == 401
        assert unix.get("http://localhost/v1/models", headers=bearer("bob")).status_code == 200


def test_the_official_client_streams(server, http):
    client = httpx.Client(verify=client_context(server.authority))
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=secret_of("alice"), max_retries=0, http_client=client
    ) as api:
        stream = api.completions.create(model="llama_tiny", prompt="Once", max_tokens=20, temperature=0, stream=True)
        chunks = list(stream)
    whole = complete(http, "alice", prompt="Once", max_tokens=20)[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert len(chunks) > 10


def test_a_quota_applies_over_tls(http):
    complete(http, "narrow")
    response = http.post("/v1/completions", json={"prompt": "a"}, headers=bearer("narrow"))
    assert response.status_code == 429
    assert 30 < int(response.headers["retry-after"]) <= 60


def test_the_load_test_with_a_key_of_the_environment(server):
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        arguments = ["--base-url", server.url, "-X", "20", "-T", "0.5", "--no-plot", "-O", str(server.folder)]
        return subprocess.run(
            [sys.executable, "performance/test_serving_performance.py", *arguments],
            cwd=REPOSITORY, env={**os.environ, "SSL_CERT_FILE": str(server.authority), **environment},
            capture_output=True, text=True, check=False, timeout=time_limit(60),
        )  # fmt: skip

    done = run(LLM_SERVING_API_KEY=secret_of("alice"))
    assert done.returncode == 0, done.stderr
    assert run(LLM_SERVING_API_KEY="wrong").returncode == 2


def test_keys_are_read_again_after_sighup(server, http):
    write_keys(server.folder / "keys", [*KEYS, "carol"])
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: http.get("/v1/models", headers=bearer("carol")).status_code == 200)
    assert server.events("api_keys_loaded")[-1]["keys"] == len(KEYS) + 1


def test_the_audit_log_names_everybody_and_no_text(server, http):
    text, _ = complete(http, "bob", prompt="Once upon a time a secret", max_tokens=8)
    path = server.folder / "audit.log"

    def lines() -> list[tuple[str, str, int, int]]:
        found = map(json.loads, path.read_text().splitlines())
        return [(line["key"], line["route"], line["status"], line["output_tokens"]) for line in found]

    wait_until(lambda: ("bob", "/v1/completions", 200, 8) in lines())
    assert path.stat().st_mode & 0o777 == 0o600
    everything = path.read_text() + server.log.read_text() + server.stderr()
    for name in ("alice", "bob", "root", "carol"):
        assert secret_of(name) not in everything
    assert "secret" not in path.read_text()
    assert text.strip() not in path.read_text()


def test_a_wrong_key_file_stops_the_start(tmp_path):
    (tmp_path / "keys").write_text("alice sk-plain\n")
    (tmp_path / "keys").chmod(0o600)
    command = [sys.executable, "start_server.py", "--set", f"serving_config.api_keys_file={tmp_path / 'keys'}"]
    command += ["--set", "serving_config.server_port=0", "--set", "serving_config.agent_ports=[0]"]
    command += ["--set", f"log_config.path={tmp_path / 'server.log'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60))
    assert done.returncode == 2
    assert "api_keys_file" in done.stderr
    assert "line 1: after the name comes sha256:" in done.stderr
    assert "sk-plain" not in done.stderr
