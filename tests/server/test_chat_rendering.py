"""Tests that long conversations and expensive chat templates are rendered in another thread.

Hostile templates end with an error.
"""

from __future__ import annotations

import threading

import pytest

from llm_serving.engine.chat_template import SHORT, WHOLE, ChatTemplate
from support.fake_engine import FakeEngine
from support.http_server import running

LOOP = "{% for i in range(COUNT) %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def rendered(tokenizer, monkeypatch):
    """Provides a server, and a list with an entry for each rendering of a chat template.

    An entry has two values: whether the event loop's thread rendered the template, and the limit of steps and
    characters for this rendering.
    """
    calls = []
    original = ChatTemplate.render

    with running(FakeEngine(tokenizer), max_context=4096, max_prompt_tokens=4000, max_body_bytes=1 << 20) as server:

        def render(template, *args, **kwargs):
            calls.append((threading.current_thread() is server._thread, kwargs.get("allowance", WHOLE)))
            return original(template, *args, **kwargs)

        monkeypatch.setattr(ChatTemplate, "render", render)
        yield server, calls


def chat(server, content="a", count=1):
    body = {"messages": [{"role": "user", "content": content}] * count, "max_tokens": 2}
    return (
        server.post("/tokenize", {"messages": body["messages"]})
        if count > 1
        else server.post("/v1/chat/completions", body)
    )


def test_short_conversations_are_rendered_at_once(rendered):
    server, calls = rendered
    assert chat(server).status_code == 200
    assert calls == [(True, SHORT)]


@pytest.mark.parametrize(("content", "count"), [("a" * 70_000, 1), ("a", 129)])
def test_long_conversations_are_rendered_in_another_thread(rendered, monkeypatch, content, count):
    server, calls = rendered
    chat(server, content, count)
    assert calls == [(False, WHOLE)]


def test_an_expensive_template_leaves_the_event_loop(rendered, monkeypatch):
    server, calls = rendered
    template = ChatTemplate(LOOP.replace("COUNT", str(2 * SHORT.steps)), {})
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    for _ in range(2):
        assert chat(server).status_code == 200
    assert calls == [(True, SHORT), (False, WHOLE), (False, WHOLE)]


def test_a_hostile_template_ends(rendered, monkeypatch):
    server, _ = rendered
    template = ChatTemplate(LOOP.replace("COUNT", "10 ** 12"), {})
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    error = chat(server).json()["error"]
    assert error["param"] == "messages"
    assert "chat template failed on the messages: it takes too many steps" in error["message"]
    assert server.http.get("/health/live").status_code == 200
