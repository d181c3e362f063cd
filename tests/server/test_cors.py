"""Tests web pages of other origins.

Allowed origins can use the server, also for streams and errors. All other origins cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import ConfigError
from llm_serving.server.state import ServerSettings
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running
from support.small_configs import small_config

PAGE = "https://Chat.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer), cors_origins=frozenset({PAGE.lower()})) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_can_read_responses(served: HttpServer, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": stream}
    response = served.http.post("/v1/completions", json=body, headers={"origin": PAGE})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in response.headers
    again = served.http.post("/v1/completions", json=body)  # the same connection sends a request without an origin
    assert "access-control-allow-origin" not in again.headers


def test_a_page_can_read_errors(served: HttpServer) -> None:
    response = served.http.post("/v1/completions", json={"prompt": 1}, headers={"origin": PAGE})
    assert response.status_code == 400
    assert response.headers["access-control-allow-origin"] == PAGE


def test_a_preflight_request(served: HttpServer) -> None:
    response = served.http.options("/v1/completions", headers={"origin": PAGE, **PREFLIGHT})
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    plain = served.http.options("/v1/completions", headers={"origin": PAGE})
    assert plain.status_code == 405


@pytest.mark.parametrize("origin", ["https://evil.example", "http://chat.example", "https://chat.example:81", "null"])
def test_other_pages_are_refused(served: HttpServer, origin: str) -> None:
    for response in (
        served.http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": origin}),
        served.http.options("/v1/completions", headers={"origin": origin, **PREFLIGHT}),
    ):
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
        assert "serving_config.cors_origins" in response.json()["error"]["message"]


def test_all_pages_may_be_allowed(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), cors_origins=frozenset({"*"})) as server:
        response = server.http.get("/v1/models", headers={"origin": "null"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "null")


def test_allowed_origins_are_read_from_the_config(tmp_path: Path) -> None:
    assert ServerSettings.from_config(small_config(tmp_path)).cors_origins == frozenset()
    override = "serving_config.cors_origins=['https://Chat.example', 'http://localhost:3000']"
    settings = ServerSettings.from_config(small_config(tmp_path, [override]))
    assert settings.cors_origins == {"https://chat.example", "http://localhost:3000"}
    for wrong in ("chat.example", "https://chat.example/", "https://", "https://a b"):
        with pytest.raises(ConfigError, match="must be an origin without a path"):
            small_config(tmp_path, [f"serving_config.cors_origins=[{wrong!r}]"])
