"""Tests ten calls of the client library litellm, for OpenAI's and Anthropic's API."""

import asyncio
import json

import litellm
import pytest
from common import CITIES, KEY, MODEL, QUESTION, SCHEMA

ASK = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {
    name: value for name, value in SCHEMA.items() if name not in ("title", "description")}}}  # fmt: skip


@pytest.fixture
def fixed(url):
    return {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0, "max_tokens": 40,
            "messages": ASK, "num_retries": 0, "max_retries": 0}  # fmt: skip


def test_answer(fixed):
    answer = litellm.completion(**fixed)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_usage(fixed):
    usage = litellm.completion(**fixed).usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens


def test_stream_is_the_answer(fixed):
    pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(stream=True, **fixed)]
    assert "".join(pieces) == litellm.completion(**fixed).choices[0].message.content


def test_asynchronous(fixed):
    async def run():
        return await asyncio.gather(*(litellm.acompletion(**fixed) for _ in range(4)))

    assert len({answer.choices[0].message.content for answer in asyncio.run(run())}) == 1


def test_limit(fixed):
    assert litellm.completion(**{**fixed, "max_tokens": 2}).choices[0].finish_reason == "length"


def test_tool_call(fixed):
    answer = litellm.completion(**{**fixed, "max_tokens": 120}, tools=[TOOL], parallel_tool_calls=False,
                                tool_choice={"type": "function", "function": {"name": "weather"}})  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


def test_structured_output(fixed):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**{**fixed, "max_tokens": 200}, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in CITIES


def test_completion(fixed):
    more = {**fixed, "model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}
    del more["messages"]
    assert litellm.text_completion(**more).choices[0].text


def test_anthropic_messages(fixed, url):
    answer = litellm.completion(**{**fixed, "model": f"anthropic/{MODEL}", "api_base": url})
    assert "Paris" in answer.choices[0].message.content


def test_error(fixed):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**fixed, "temperature": 9})
