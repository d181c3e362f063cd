"""Tests that the examples of docs/http_api.md work, and that every endpoint has an example."""

import json
import re
import shlex

import pytest

from llm_serving.server.pooling import classification, embeddings, ranking
from llm_serving.server.routes import ENDPOINTS
from support.fake_engine import MODEL_NAME
from support.small_configs import REPOSITORY

TEXT = (REPOSITORY / "docs" / "http_api.md").read_text("utf-8")
POOLED = {endpoint.path for endpoint in (*embeddings.ENDPOINTS, *ranking.ENDPOINTS, *classification.ENDPOINTS)}
"""Endpoints that a server refuses if its model generates text. tests/integration/test_embeddings.py runs them."""
BASE = "http://127.0.0.1:8835"


def refusal_of(path: str) -> tuple[int, str] | None:
    """Returns the status and the code with which the server of these tests refuses a path.

    None if the server accepts it.
    """
    if path.startswith(("/v1/files", "/v1/batches")):
        return 400, "batches_off"
    if path.endswith("/timeline"):  # there is no flight recorder
        return 404, "request_not_found"
    if path.startswith("/v1/cluster"):  # the agents are not on nodes
        return 409, "node_conflict"
    if path.startswith("/v1/shadow"):
        return 404, "shadow_off"
    if path.startswith("/v1/sessions/"):  # the example of an import names the model
        return (400, "sessions_off") if "?" in path else (404, "session_not_found")
    if path == "/v1/load_lora_adapter":
        return 400, "invalid_adapter"
    if path == "/v1/unload_lora_adapter":
        return 404, "model_not_found"
    if path.startswith("/v1/models/") and path.endswith(("/load", "/unload", "/sleep", "/wake", "/reload")):
        return 409, "model_state"
    return (400, "unsupported_task") if path in POOLED else None


def examples() -> list[tuple[str, str, str | None]]:
    """Returns method, path and body of each curl command."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL):
        for line in block.replace("\\\n", "").strip().split("\n"):
            words = shlex.split(line)
            assert words[0] == "curl"
            url = next(word for word in words if word.startswith(BASE))
            body = words[words.index("-d") + 1] if "-d" in words else None
            method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
            found.append((method, url.removeprefix(BASE), body))
    return found


EXAMPLES = examples()


def test_every_endpoint_is_described_with_an_example():
    names = {
        "MODEL": "{name}",
        "REQUEST": "{request_id}",
        "RESPONSE": "{response_id}",
        "FILE": "{file_id}",
        "BATCH": "{batch_id}",
        "SESSION": "{session_id}",
        "chat.html": "{file}",
    }
    shown = set()
    for method, url, _ in EXAMPLES:
        path = url.partition("?")[0]
        for stated, name in names.items():
            path = path.replace(stated, name)
        shown.add((method, path))
    assert shown == {(endpoint.method, endpoint.path.replace(":path", "")) for endpoint in ENDPOINTS}
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.method} {endpoint.path.replace(':path', '')}`" in TEXT


def prepare_profile(server, path):
    """Starts a profile before the example that stops one, and ends it before each other example.

    So each example works alone and in any order.
    """
    server.http.post("/profile/stop")
    if path == "/profile/stop":
        server.http.post("/profile/start")


@pytest.mark.parametrize(("method", "path", "body"), EXAMPLES)
def test_the_example_works(server, method, path, body):
    prepare_profile(server, path)
    if "REQUEST" in path:
        path = path.replace("REQUEST", server.post("/v1/completions", {"prompt": "a"}).json()["id"])
    if "RESPONSE" in path:
        path = path.replace("RESPONSE", server.post("/v1/responses", {"input": "a"}).json()["id"])
    content = None if body is None else json.dumps(json.loads(body))
    headers = {} if body is None else {"Content-Type": "application/json"}
    response = server.http.request(method, path.replace("MODEL", MODEL_NAME), content=content, headers=headers)
    if (refusal := refusal_of(path)) is not None:
        assert (response.status_code, response.json()["error"]["code"]) == refusal
        return
    assert response.status_code == 200, response.text
    streams = body is not None and ("stream" in path or '"stream": true' in body)
    assert response.headers["content-type"].startswith("text/event-stream") == streams


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.example], ids=lambda endpoint: endpoint.path)
def test_the_examples_of_the_docs_page_work(server, endpoint):
    path = endpoint.path.replace("{name}", MODEL_NAME)
    prepare_profile(server, path)
    response = server.http.post(path, json=json.loads(endpoint.example))
    if (refusal := refusal_of(path)) is not None:
        assert (response.status_code, response.json()["error"]["code"]) == refusal
        return
    assert response.status_code == 200, response.text
