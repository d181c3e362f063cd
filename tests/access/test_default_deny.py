"""Tests that a server with API keys answers without a key only ``/health/live`` and the files of the web pages.

The tests cover every route, every spelling of its path, and every way to send a key.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter

import pytest

from llm_serving.access import key_store
from llm_serving.access.keys import digest_of
from llm_serving.errors import QueueFullError, QuotaExceededError
from llm_serving.server.routes import ENDPOINTS
from support.access_keys import access_for, bearer, secret_of, write_keys
from support.fake_engine import FakeEngine
from support.http_server import http_request, read_response, running, wait_until
from support.lazy_module import LazyModule
from support.small_configs import REPOSITORY
from tools.reference.source_trees import syntax_tree

openai = LazyModule("openai")

ROUTES = sorted({(one.method, re.sub(r"{[^}]*}", "fake-llama", one.path)) for one in ENDPOINTS})
LIVE = ("GET", "/health/live")
OPEN = {LIVE, ("GET", "/"), ("GET", "/operator"), ("GET", "/static/fake-llama")}
"""The routes that need no key. Files of the web pages are public, so the last route gives status 404 and not 401."""
KEY = secret_of("alice")
WITHOUT_KEY = {
    "no key": (),
    "wrong key": ("Authorization: Bearer sk-wrong",),
    "hash of the key": ("Authorization: Bearer sha256:00",),
    "beginning of the key": (f"Authorization: Bearer {KEY[:-1]}",),
    "longer key": (f"Authorization: Bearer {KEY}x",),
    "other case": (f"Authorization: Bearer {KEY.upper()}",),
    "key without a scheme": (f"Authorization: {KEY}",),
    "basic": (f"Authorization: Basic {KEY}",),
    "empty": ("Authorization: Bearer ",),
    "wrong X-Api-Key": ("X-Api-Key: sk-wrong",),
    "empty X-Api-Key": ("X-Api-Key: ",),
    "X-Api-Key with a scheme": (f"X-Api-Key: Bearer {KEY}",),
    "two headers": (f"X-Api-Key: {KEY}", f"Authorization: Bearer {KEY}"),
    "api-key": (f"api-key: {KEY}",),
    "Proxy-Authorization": (f"Proxy-Authorization: Bearer {KEY}",),
    "cookie": (f"Cookie: Authorization=Bearer {KEY}",),
    "forwarded": ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"),
    "other path": ("X-Original-URL: /health/live", "X-Rewrite-URL: /health/live"),
    "other method": ("X-HTTP-Method-Override: GET",),
}


@pytest.fixture(scope="module")
def served(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    refusals = Counter()
    access = access_for(folder, "alice", "root admin", refused=lambda reason: refusals.update([reason]))
    with running(FakeEngine(tokenizer), access) as server:
        server.folder, server.refusals = folder, refusals
        yield server


def send(server, method, path, *headers, body=b""):
    """Sends a request on its own connection. Returns status, headers and body."""
    with server.raw(http_request(path, body, *headers, method=method)) as connection:
        if method == "HEAD":
            data = connection.recv(65536)
            return int(data.split()[1]), {}, b""
        return read_response(connection)


@pytest.mark.parametrize("way", WITHOUT_KEY)
def test_no_route_is_open_without_a_key(served, way, record_property):
    """Checks E8 of docs/reliability.md: without a key, a request reaches only the routes of the allowlist."""
    statuses = {route: send(served, *route, *WITHOUT_KEY[way])[0] for route in ROUTES}
    assert len(statuses) > 20
    reached = {route for route, status in statuses.items() if status != 401}
    record_property("open_routes", f"{len(reached - OPEN)} of {len(statuses)}")
    assert reached == OPEN
    assert [statuses[route] for route in sorted(OPEN)] == [200, 200, 200, 404]


def test_methods_and_unknown_paths_are_closed(served, record_property):
    paths = sorted({path for _, path in ROUTES} | {"/unknown", "/v1", "/favicon.ico"})
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    found = {(method, path): send(served, method, path)[0] for path in paths for method in methods}
    reached, expected = {each for each in found if found[each] != 401}, OPEN | {("HEAD", path) for _, path in OPEN}
    record_property("open_routes", f"{len(reached - expected)} of {len(found)}")
    assert reached == expected


TRICKS = (
    ["//metrics", "/metrics/", "/metrics//", "/METRICS", "/%6detrics", "/%2fmetrics", "/./metrics",
     "/metrics?/health/live", "/metrics#/health/live", "/health/live/../metrics", "/health/live/..%2f..%2fmetrics",
     "/health/live/%2e%2e/metrics",
     "/health/live;/metrics", "/health/live%00", "/health/live%0a", "/health/live/", "//health/live", "/Health/Live",
     "/health%252flive", "/health/live%20", "http://127.0.0.1/metrics", "/v1/models/health/live", "/metrics%3f",
     "/\\metrics", "/health/../metrics", "/static", "//static/js/main.js", "/Static/js/main.js",
     "/%2fstatic/js/main.js"]
)  # fmt: skip
"""Spellings of closed paths that a careless comparison could take for an open path."""


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_path_tricks_do_not_pass(served, method, record_property):
    statuses = {path: send(served, method, path)[0] for path in TRICKS}
    reached = {path: status for path, status in statuses.items() if status not in (400, 401)}
    record_property("open_routes", f"{len(reached)} of {len(statuses)}")
    assert reached == {}


@pytest.mark.parametrize(
    "path", ["/static/../metrics", "/static/%2e%2e/metrics", "/static/..%2f..%2fcontrol.py", "/static//js/main.js",
             "/static/js/../js/main.js", "/static/", "/static/js", "/static/%00", "/static//etc/passwd"],
)  # fmt: skip
def test_the_open_folder_has_only_the_pages_files(served, path):
    assert send(served, "GET", path)[0] in (400, 404)
    assert send(served, "POST", path)[0] == 401


def test_the_refusal_has_openais_form(served):
    before = served.refusals.copy()
    status, headers, body = send(served, "POST", "/v1/completions", body=b'{"prompt": "a"}')
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert error["message"].startswith("The request has no API key.")
    _, _, body = send(served, "GET", "/v1/models", "Authorization: Bearer sk-wrong-key")
    assert "sk-wrong-key" not in body.decode()
    assert served.refusals - before == {"missing_key": 1, "wrong_key": 1}


def test_two_authorization_headers_are_refused(served):
    """A request with two Authorization headers is refused, because a proxy and the server could read different ones."""
    right, wrong = f"Authorization: Bearer {KEY}", "authorization: Bearer sk-wrong"
    for first, second in ((right, wrong), (wrong, right)):
        assert send(served, "GET", "/v1/models", first, second)[0] == 401


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.0"])
def test_another_protocol_does_not_pass(served, protocol):
    headers = (f"Upgrade: {protocol}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    assert send(served, "GET", "/metrics", *headers)[0] == 401


def test_a_request_with_a_key_costs_one_hash(served, monkeypatch):
    hashed = []
    monkeypatch.setattr(key_store, "digest_of", lambda secret: hashed.append(secret) or digest_of(secret))
    assert send(served, "POST", "/generate", f"Authorization: Bearer {KEY}", body=b'{"inputs": "a"}')[0] == 200
    assert hashed == [KEY]


def test_a_server_without_keys_does_not_use_access_control(tokenizer, monkeypatch):
    monkeypatch.setattr("llm_serving.server.app.Visit", None)
    with running(FakeEngine(tokenizer)) as server:
        assert server.post("/generate", {"inputs": "a"}).status_code == 200


def test_the_authorization_scheme_ignores_case(served):
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert send(served, "GET", "/v1/models", f"Authorization: {scheme} {KEY}")[0] == 200


def test_administration_needs_the_right(served):
    routes = [(one.method, one.path) for one in ENDPOINTS if one.admin and ("GET", one.path) not in OPEN]
    assert {path for _, path in routes} >= {"/metrics", "/server_info", "/requests", "/profile/start", "/profile/stop"}
    for method, path in routes:
        status, _, body = send(served, method, path, f"Authorization: Bearer {KEY}")
        assert (status, json.loads(body)["error"]["code"]) == (403, "not_permitted")
    for path in ("/metrics", "/server_info"):
        assert send(served, "GET", path, f"Authorization: Bearer {secret_of('root')}")[0] == 200


def test_browser_attacks_are_refused_before_the_key_is_read(served):
    key = f"Authorization: Bearer {secret_of('root')}"
    assert send(served, "GET", "/metrics", key, "Host: evil.example")[0] == 403
    assert send(served, "POST", "/profile/stop", key, "Origin: http://evil.example")[0] == 403
    assert send(served, "POST", "/v1/completions", key, "Content-Type: text/plain", body=b'{"prompt": "a"}')[0] == 415


def test_the_official_client_works_with_a_key(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        assert [model.id for model in client.models.list()] == ["fake-llama"]
        assert client.completions.create(model="fake-llama", prompt="a").choices[0].text.strip() == "hello to the bird"
        chunks = client.completions.create(model="fake-llama", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks).strip() == "hello to the bird"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=10) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_keys_are_exchanged_while_the_server_runs(served):
    assert served.http.get("/v1/models", headers=bearer("next")).status_code == 401
    write_keys(served.folder / "keys", ["next", "root admin"])
    wait_until(lambda: served.http.get("/v1/models", headers=bearer("next")).status_code == 200)
    assert served.http.get("/v1/models", headers=bearer("alice")).status_code == 401
    write_keys(served.folder / "keys", ["alice", "root admin"])
    wait_until(lambda: served.http.get("/v1/models", headers=bearer("alice")).status_code == 200)
    assert served.http.get("/v1/models", headers=bearer("next")).status_code == 401


def test_secrets_are_compared_in_constant_time():
    """Checks E8 of docs/reliability.md: comparing secrets with == would reveal by its time how many characters are
    right.
    """
    tree = syntax_tree(REPOSITORY / "llm_serving/access/key_store.py")
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    assert "compare_digest" in called
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert [text for text in compared if "secret" in text and "len(secret)" not in text] == []


def test_the_openapi_document_states_the_key_and_the_refusals(served):
    document = json.loads(send(served, "GET", "/openapi.json", f"Authorization: Bearer {KEY}")[2])
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["components"]["securitySchemes"]["api_key"]["name"] == "X-Api-Key"
    assert document["security"] == [{"bearer": []}, {"api_key": []}]
    paths = document["paths"].items()
    operations = {(method.upper(), path): one for path, methods in paths for method, one in methods.items()}
    assert {each for each, one in operations.items() if "security" in one} == {LIVE}
    assert operations[LIVE]["security"] == []
    for each, one in operations.items():
        assert set(one["responses"]) == ({"200", "403", "default"} if each == LIVE else
                                         {"200", "401", "403", "429", "default"})  # fmt: skip
    unauthorized = document["components"]["responses"]["Unauthorized"]
    status, headers, body = send(served, "GET", "/v1/models", "Authorization: Bearer sk-wrong")
    [example] = [one["value"]["error"] for one in unauthorized["content"]["application/json"]["examples"].values()]
    error = json.loads(body)["error"]
    assert (status, {**error, "message": ""}) == (401, {**example, "message": ""})
    assert {name.lower() for name in unauthorized["headers"]} <= set(headers)
    forbidden = send(served, "GET", "/metrics", f"Authorization: Bearer {KEY}")
    codes = {name: {each["value"]["error"]["code"] for each in one["content"]["application/json"]["examples"].values()}
             for name, one in document["components"]["responses"].items()}  # fmt: skip
    assert json.loads(forbidden[2])["error"]["code"] in codes["Forbidden"]
    assert codes["TooManyRequests"] == {QuotaExceededError.code, QueueFullError.code}
