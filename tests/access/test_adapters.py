"""Tests over HTTP which keys may use a LoRA adapter, and which keys may load and unload adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_serving.lora.registry import Adapter, AdapterRegistry
from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import running

KEYS = ("all", "operator admin", "base models=fake-llama", "sql models=sql", "both models=fake-llama,sql")


@pytest.fixture(scope="module")
def server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = FakeEngine(tokenizer)
    engine.adapters = AdapterRegistry(2)
    engine.adapters.add(Adapter("sql", "/adapters/sql", b"digest", engine.adapters.take_slot()))
    with running(engine, access_for(tmp_path_factory.mktemp("access"), *KEYS)) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("key", "models"),
    [("all", ["fake-llama", "sql"]), ("base", ["fake-llama"]), ("sql", ["sql"]), ("both", ["fake-llama", "sql"])],
)
def test_a_key_may_use_and_see_only_its_models(server: Any, key: str, models: list[str]) -> None:
    listed = server.http.get("/v1/models", headers=bearer(key)).json()["data"]
    assert [each["id"] for each in listed] == models
    for model in ("fake-llama", "sql"):
        response = server.http.post("/v1/completions", json={"prompt": "a", "model": model}, headers=bearer(key))
        assert response.status_code == (200 if model in models else 403), response.text
        if model in models:
            adapter = server.engine.submitted[-1].adapter
            assert (adapter is None) == (model == "fake-llama")
            assert response.json()["model"] == model
        else:
            assert response.json()["error"]["param"] == "model"


def test_only_an_administrator_sees_the_folder_of_an_adapter(server: Any) -> None:
    def adapter(key: str) -> list[dict[str, Any]]:
        models = server.http.get("/v1/models", headers=bearer(key)).json()["data"]
        return [models[-1], server.http.get("/v1/models/sql", headers=bearer(key)).json()]

    assert [each["root"] for each in adapter("operator")] == ["/adapters/sql"] * 2
    for key in ("all", "sql"):
        entries = adapter(key)
        assert [each["id"] for each in entries] == ["sql", "sql"]
        assert not any("root" in each for each in entries)
    assert server.http.get("/v1/models/sql", headers=bearer("base")).status_code == 403


def test_only_an_administrator_loads_and_unloads_adapters(server: Any) -> None:
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/other"}),
        ("/v1/unload_lora_adapter", {"lora_name": "missing"}),
    ):
        assert server.http.post(path, json=body).status_code == 401
        assert server.http.post(path, json=body, headers=bearer("all")).status_code == 403
        response = server.http.post(path, json=body, headers=bearer("operator"))
        assert response.status_code in (400, 404), response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "fake-llama", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "sql", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/a", "rank": 3}, "rank"),
        ({"lora_name": "a", "lora_path": 3}, "lora_path"),
    ],
)
def test_a_wrong_load_is_refused_with_its_field(server: Any, body: dict[str, Any], param: str) -> None:
    response = server.http.post("/v1/load_lora_adapter", json=body, headers=bearer("operator"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
