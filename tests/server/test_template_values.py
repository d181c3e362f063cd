"""Tests ``chat_template_kwargs``.

The template sees these values. Their size is limited, and they cannot replace the server's own values.
"""

from __future__ import annotations

from typing import Any

import pytest

from llm_serving.config.serving_section import ServingConfig
from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.tokenizer import Tokenizer
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running

TEMPLATE = (
    "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}no {% endif %}{{ messages[0].content }}"
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_config_fixes_the_date(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate("{{ strftime_now('%d.%m.%Y') }}", {}))
    serving = ServingConfig(template_date="2024-07-06")
    with running(FakeEngine(tokenizer), template_day=serving.template_day) as server:
        assert prompt_of(server, path, None) == "06.07.2024"
    assert ServingConfig().template_day is None


@pytest.fixture
def served(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", ChatTemplate(TEMPLATE, {"bos_token": ""}))
    return server


def prompt_of(server: HttpServer, path: str, values: Any) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "chat_template_kwargs": values}
    response = server.post(path, body | ({"max_tokens": 2} if path.startswith("/v1") else {}))
    assert response.status_code == 200, response.text
    ids = response.json()["tokens"] if path == "/tokenize" else server.engine.submitted[-1].prompt_token_ids
    return server.engine.tokenizer.decode(ids)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_template_sees_the_values(served: HttpServer, path: str) -> None:
    assert prompt_of(served, path, {"enable_thinking": False, "other": 1, "text": "x", "none": None}) == "no abc"
    for values in ({"enable_thinking": True}, {}, None):
        assert prompt_of(served, path, values) == "abc"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": "x"}, "'chat_template_kwargs' holds 'messages', which the server sets."),
        ({"bos_token": "x"}, "holds 'bos_token', which the server sets."),
        ({"add_generation_prompt": False}, "holds 'add_generation_prompt', which the server sets."),
        ({f"v{i}": 1 for i in range(33)}, "should hold at most 32 values, not 33"),
        ({"a": "x" * 4097}, "holds a with 4097 characters; the maximum is 4096"),
        ({"a": [1]}, "holds a, which should be text, a number, a boolean or null"),
        ({"a b": 1}, "which is not the name of a variable"),
        ([1], "should be an object"),
    ],
)
def test_wrong_values_are_refused(served: HttpServer, values: Any, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "chat_template_kwargs": values}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "chat_template_kwargs"
    assert served.engine.submitted == []
