"""Tests tools with a real server. The grammar forces small models to call functions, whatever their logits are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.lazy_module import LazyModule
from support.server_process import ServerProcess, running_server
from support.sweeps import with_sweeps

openai = LazyModule("openai")

ASK: list[Any] = [{"role": "user", "content": "How is the weather in Bern?"}]
PROPERTIES = {"city": {"enum": ["Bern", "Rio"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Returns the weather.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city", "days"],
                           "additionalProperties": False},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMATS = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "gpt_oss")
TESTED_FORMATS = ("hermes", "gpt_oss")
"""The formats of ``make test``. ``tests/constraints/test_calls.py`` compiles the grammar of every format."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("plain"), [f"model_config.model_path={shallow_model}"]) as server:
        yield server


@pytest.fixture
def client(plain: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: ServerProcess, **more: Any) -> dict[str, Any]:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "seed": 1} | more
    answer = server.post("/v1/chat/completions", body)
    assert "choices" in answer, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def check(choice: dict[str, Any]) -> None:
    """Checks that a choice is one call of ``weather`` whose arguments fit the schema."""
    assert choice["finish_reason"] == "tool_calls", choice
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Bern", "Rio")
    assert arguments["days"] in range(1, 10)
    assert len(arguments) == 2


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return choice | {"message": calls}


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_the_grammar_forces_a_call(plain: ServerProcess, temperature: float) -> None:
    for seed in range(4):
        check(ask(plain, temperature=temperature, seed=seed))


def test_calls_are_the_same_alone_and_together(plain: ServerProcess) -> None:
    bodies = [{"seed": seed, "temperature": 1} for seed in range(8)]
    alone = [without_ids(ask(plain, **body)) for body in bodies]
    assert len({json.dumps(one["message"]) for one in alone}) > 1
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: without_ids(ask(plain, **body)), bodies)) == alone


def test_a_streamed_call_equals_the_whole_one(plain: ServerProcess, client: openai.OpenAI) -> None:
    for seed in range(4):
        whole = ask(plain, seed=seed, temperature=1)
        name, arguments, reasons = "", "", []
        body: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "seed": seed}
        for chunk in client.chat.completions.create(model=whole_model(plain), stream=True, temperature=1, **body):
            [choice] = chunk.choices
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        expected = whole["message"]["tool_calls"][0]["function"]
        assert (name, arguments, reasons) == (expected["name"], expected["arguments"], ["tool_calls"])


def whole_model(server: ServerProcess) -> str:
    name: str = server.get("/v1/models")["data"][0]["id"]
    return name


def test_required_calls_and_results(plain: ServerProcess) -> None:
    choice = ask(plain, tool_choice="required", temperature=1, parallel_tool_calls=False)
    assert choice["finish_reason"] in ("tool_calls", "length")
    calls = choice["message"]["tool_calls"]
    assert all(call["function"]["name"] in ("weather", "now") for call in calls)
    first = ask(plain)["message"]
    results = [{"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sunny"}]
    answer = ask(plain, messages=[*ASK, first, *results], tool_choice="auto", max_tokens=20)
    assert answer["message"]["role"] == "assistant"


@pytest.mark.parametrize("name", with_sweeps([(name,) for name in FORMATS], lambda name: name not in TESTED_FORMATS))
def test_each_format_forces_a_call(tmp_path: Path, name: str) -> None:
    with running_server(tmp_path, [f"serving_config.tool_format={name}"]) as server:
        for seed in range(3):
            check(ask(server, seed=seed, temperature=1))


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path) -> Path:
    """Provides the shallow model with a template whose prompts end within the reasoning."""
    folder = tmp_path_factory.mktemp("model")
    for file in shallow_model.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((shallow_model / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, thinking_model: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("thinking"), [f"model_config.model_path={thinking_model}"]) as server:
        yield server


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Bern", "Rio"]}}}


def think(server: ServerProcess, budget: int, **more: Any) -> dict[str, Any]:
    body = {"messages": ASK, "thinking_token_budget": budget, "max_tokens": 150, "temperature": 1, "seed": budget}
    answer = server.post("/v1/chat/completions", body | more)
    assert "choices" in answer, answer
    del answer["usage"]["prompt_tokens_details"]  # the prefix cache has the prompts of earlier requests
    return {"choice": answer["choices"][0], "usage": answer["usage"]}


def test_a_budget_ends_the_reasoning(thinking: ServerProcess) -> None:
    alone = [think(thinking, budget, max_tokens=70) for budget in range(0, 32, 4)]
    used = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in alone]
    marker = used[0]
    assert 0 < marker < 10
    assert all(number <= 4 * i + marker + 3 for i, number in enumerate(used))
    assert max(used) > 20, "the model reasons as long as it may"
    assert sum(bool(one["choice"]["message"]["content"]) for one in alone) >= 4, "most choices have content"
    with ThreadPoolExecutor(len(alone)) as pool:
        assert list(pool.map(lambda budget: think(thinking, budget, max_tokens=70), range(0, 32, 4))) == alone


@pytest.mark.parametrize("budget", [0, 9])
def test_json_and_calls_begin_after_the_reasoning(thinking: ServerProcess, budget: int) -> None:
    for seed in range(4):
        choice = think(thinking, budget, seed=seed, response_format=FORMAT)["choice"]
        assert json.loads(choice["message"]["content"]) in ("Bern", "Rio")
        choice = think(thinking, budget, seed=seed, tools=TOOLS, tool_choice=NAMED)["choice"]
        check(choice)
        assert bool(choice["message"]["reasoning_content"]) is (budget > 0)


def test_drafts_change_no_reasoning(thinking_model: Path, tmp_path: Path) -> None:
    """Without temperature, the text repeats itself. So the marker at the end is not the only draft."""
    cases = [(budget, more) for budget in (0, 5, 40) for more in ({"temperature": 0}, {"response_format": FORMAT})]
    found = []
    for method in ("off", "suffix"):
        settings = [f"model_config.model_path={thinking_model}", f"speculative_config.method={method}"]
        with running_server(tmp_path / method, settings) as server:
            found.append([think(server, budget, logprobs=True, **more) for budget, more in cases])
            accepted = server.counter("accepted_draft_tokens")
        assert (accepted > 20) == (method == "suffix")
    assert found[0] == found[1]


def test_a_killed_agent_changes_no_reasoning(thinking: ServerProcess) -> None:
    budgets = range(8, 16)
    alone = [think(thinking, budget, max_tokens=90)["choice"] for budget in budgets]
    with ThreadPoolExecutor(len(budgets)) as pool:
        with thinking.arrivals(len(budgets)):  # a request that arrives after the kill gets a 503
            pending = [pool.submit(think, thinking, budget, max_tokens=90) for budget in budgets]
        thinking.agents()[0].kill()
        assert [each.result()["choice"] for each in pending] == alone
